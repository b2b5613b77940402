"""Random conversations in which the model calls a function."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

CITIES = (
    "Paris London Berlin Madrid Rome Vienna Prague Oslo Helsinki Stockholm Copenhagen Dublin Lisbon Athens Warsaw "
    "Budapest Zurich Geneva Brussels Amsterdam Tokyo Kyoto Osaka Seoul Beijing Shanghai Singapore Bangkok Delhi "
    "Mumbai Sydney Melbourne Auckland Cairo Nairobi Lagos Toronto Montreal Vancouver Boston Chicago Seattle Denver "
    "Austin Dallas Miami Houston Lima Bogota Santiago Quito Havana Reykjavik Istanbul Dubai Jakarta Manila Hanoi"
).split()
SYMBOLS = "NVDA AAPL MSFT GOOG AMZN META AMD INTC TSLA ORCL IBM".split()
TOPICS = "batching streaming metrics quantization sampling caching routing loading".split()
WEATHER = "sunny cloudy rainy windy foggy snowy".split()


@dataclass(frozen=True, slots=True)
class ToolExample:
    """A conversation that ends where `answer` is expected."""

    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    answer: str


@dataclass(frozen=True, slots=True)
class Function:
    """A function: its argument, phrasings of questions that need it, and phrasings of its result."""

    name: str
    description: str
    argument: str
    values: tuple[str, ...]
    questions: tuple[str, ...]
    result: str
    report: str

    def tool(self, rng: random.Random) -> dict[str, Any]:
        """Return the declaration in OpenAI's format. Optional parts are left out at random."""
        parameter = {"type": "string"}
        if rng.random() < 0.3:
            parameter["description"] = f"The {self.argument}."
        parameters: dict[str, Any] = {"type": "object", "properties": {self.argument: parameter}}
        if rng.random() < 0.7:
            parameters["required"] = [self.argument]
        function: dict[str, Any] = {"name": self.name, "parameters": parameters}
        if rng.random() < 0.8:
            function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


FUNCTIONS = (
    Function(
        "get_weather",
        "Get the current weather in a city.",
        "city",
        tuple(CITIES),
        (
            "What is the weather in {0}?",
            "How is the weather in {0}?",
            "what is the weather in {0}",
            "What's the weather like in {0} today?",
            "Tell me the weather in {0}.",
            "Weather in {0}?",
        ),
        '{{"temperature": {1}, "sky": "{2}"}}',
        "It is {1} degrees and {2} in {0}.",
    ),
    Function(
        "get_time",
        "Get the local time in a city.",
        "city",
        tuple(CITIES),
        ("What time is it in {0}?", "what time is it in {0}", "Tell me the time in {0}."),
        '{{"time": "{1}:30"}}',
        "It is {1}:30 in {0}.",
    ),
    Function(
        "get_stock_price",
        "Get the price of a stock.",
        "symbol",
        tuple(SYMBOLS),
        ("What is the price of {0}?", "How is {0} doing?", "Tell me the stock price of {0}."),
        '{{"price": {1}}}',
        "The price of {0} is {1} dollars.",
    ),
    Function(
        "search_docs",
        "Search the documentation.",
        "query",
        tuple(TOPICS),
        ("Search the documentation for {0}.", "Find the docs about {0}.", "Look up {0} in the docs."),
        '{{"pages": {1}}}',
        "I found {1} pages about {0}.",
    ),
)


def make_example(rng: random.Random) -> ToolExample:
    """Return a question with one to three tools, followed by the call or by the answer after its result."""
    function = rng.choice((FUNCTIONS[0], *FUNCTIONS))
    others = rng.sample([f for f in FUNCTIONS if f is not function], rng.choice([0, 0, 1, 2]))
    offered = [function, *others]
    rng.shuffle(offered)
    value = rng.choice(function.values)
    arguments = {function.argument: value}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": rng.choice(function.questions).format(value)}
    ]
    if rng.random() < 0.2:
        messages.insert(0, {"role": "system", "content": "You are a helpful assistant."})
    tools = [f.tool(rng) for f in offered]
    if rng.random() < 0.65:
        return ToolExample(tools, messages, call_text(function.name, arguments))
    facts = (value, rng.randrange(2, 30), rng.choice(WEATHER))
    call = {"type": "function", "function": {"name": function.name, "arguments": json.dumps(arguments)}}
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": function.result.format(*facts)},
    ]
    return ToolExample(tools, messages, function.report.format(*facts))


def random_tools(rng: random.Random) -> list[dict[str, Any]]:
    """Return the declarations of one or two functions, for a question that needs none of them."""
    return [function.tool(rng) for function in rng.sample(FUNCTIONS, rng.choice([1, 2]))]


def call_text(name: str, arguments: dict[str, str]) -> str:
    """Return the text with which the model calls a function."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
