"""White space between the tokens of JSON."""

from __future__ import annotations

from typing import Any

WHITESPACE = r"\n[ \t]{0,32}| "
"""Unless a request says otherwise: models that love new lines would write nothing else."""


def with_white_space(schema: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The schema with llguidance's `options` for white space, which go before its own, or with `WHITESPACE`."""
    own = schema.get("x-guidance")
    options = {**(own if isinstance(own, dict) else {}), **options}
    if options.get("whitespace_flexible", True):
        options.setdefault("whitespace_pattern", WHITESPACE)
    return {**schema, "x-guidance": options}
