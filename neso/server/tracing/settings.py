"""Trace-setting updates by clients; `neso.server.trace_config` defines the settings at start."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from neso.server.errors import InvalidArgument, Unsupported
from neso.server.trace_config import TraceLevel, TraceMode, TraceSetting

_INTEGER_TEXT = re.compile(r"\s*[+-]?\d+\s*")


@dataclass(frozen=True, slots=True)
class _NumberField:
    """A numeric setting and its range, which appears in error messages as in Triton."""

    name: str
    low: int
    high: int


_NUMBERS = {
    "trace_rate": _NumberField("rate", 0, 2**32 - 1),
    "trace_count": _NumberField("count", -1, 2**31 - 1),
    "log_frequency": _NumberField("log_frequency", 0, 2**32 - 1),
}


@dataclass(frozen=True, slots=True)
class Overrides:
    """Explicitly set values; None if not set."""

    level: TraceLevel | None = None
    rate: int | None = None
    count: int | None = None
    log_frequency: int | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) is not None for field in fields(self))

    def over(self, base: TraceSetting) -> TraceSetting:
        """Return `base` with the explicitly set values replaced."""
        return TraceSetting(
            *(
                getattr(base, field.name) if (value := getattr(self, field.name)) is None else value
                for field in fields(self)
            )
        )


def read_update(values: Mapping[str, Sequence[str]], mode: TraceMode) -> dict[str, Any]:
    """Parse an update: the fields of `Overrides` that change. An empty value clears a setting. Raises `ServerError`."""
    changes: dict[str, Any] = {}
    for name, texts in values.items():
        if name == "trace_file":
            raise Unsupported("trace file location can not be updated through network protocol")
        if name == "trace_level":
            changes["level"] = _updated_level(texts) if texts else None
        elif name in _NUMBERS:
            field = _NUMBERS[name]
            changes[field.name] = _updated_number(name, field, texts) if texts else None
        elif name == "trace_mode":
            if list(texts) != [mode.value]:
                raise Unsupported("trace mode can not be updated through network protocol")
        else:
            known = ", ".join(("trace_level", *_NUMBERS))
            raise InvalidArgument(f"unknown trace setting '{name}', expected one of {known}")
    return changes


def _updated_level(texts: Sequence[str]) -> TraceLevel:
    level = TraceLevel.OFF
    for text in texts:
        if text not in TraceLevel.__members__:
            raise InvalidArgument(
                f"unknown trace level '{text}', expected one of {', '.join(TraceLevel.__members__)}"
            )
        if text == "OFF" and len(texts) > 1:
            raise InvalidArgument("Expect only one trace level 'OFF' is specified")
        level |= TraceLevel[text]
    return level


def _updated_number(name: str, field: _NumberField, texts: Sequence[str]) -> int:
    if len(texts) != 1:
        raise InvalidArgument(f"expect only 1 value for '{name}'")
    (text,) = texts
    if not _INTEGER_TEXT.fullmatch(text):
        raise InvalidArgument(f"Unable to parse '{name}', got: {text}")
    value = int(text)
    if name == "trace_count" and -(2**31) <= value < field.low:
        raise InvalidArgument(f"Unable to parse '{name}'. Expecting value >= {field.low}, got: {text}")
    if not field.low <= value <= field.high:
        raise InvalidArgument(
            f"Unable to parse '{name}', value is out of range [ {field.low}, {field.high} ], got: {text}"
        )
    return value
