"""The functions that the agent may call, and their definitions."""

from __future__ import annotations

import re
from typing import Any

# A table of historical prices, so that the example works offline.
STOCKS = {
    "AAPL": ("Apple", 209.82),
    "AMD": ("AMD", 94.49),
    "AMZN": ("Amazon", 186.54),
    "GOOG": ("Google", 162.42),
    "IBM": ("IBM", 229.33),
    "INTC": ("Intel", 20.10),
    "META": ("Meta", 533.15),
    "MSFT": ("Microsoft", 387.30),
    "NVDA": ("Nvidia", 106.38),
    "ORCL": ("Oracle", 137.49),
    "TSLA": ("Tesla", 259.51),
}


def get_current_stock_price(symbol: str) -> float:
    """Return the price of a stock in dollars."""
    return STOCKS[symbol][1]


FUNCTIONS = {"get_current_stock_price": get_current_stock_price}
REPORTS = {
    "get_current_stock_price": "(The price of )?{symbol} (is|stands|trades) (now )?(at )?{result} dollars( a share)?\\."
}
"""Regular expression for sentences with the result, per function."""


def describe_report(name: str, arguments: dict[str, Any], result: str) -> str:
    """Return a regular expression for sentences with the result of a call."""
    facts = {key: re.escape(str(value)) for key, value in arguments.items()}
    return REPORTS[name].format(**facts, result=re.escape(result))


def describe_tools(prompt: str) -> list[dict[str, Any]]:
    """Return the functions in OpenAI's format.

    The schema allows only symbols of the table. If the prompt names companies, it allows only their symbols, because a
    small model does not know that Nvidia is NVDA.
    """
    named = [symbol for symbol, (company, _) in STOCKS.items() if company.lower() in prompt.lower()]
    return [
        {
            "type": "function",
            "function": {
                "name": "get_current_stock_price",
                "description": "Get the price of a stock.",
                "parameters": {
                    "type": "object",
                    "properties": {"symbol": {"enum": named or list(STOCKS)}},
                    "required": ["symbol"],
                    "additionalProperties": False,
                },
            },
        }
    ]
