"""Registry of parsers by name, with detection by chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Generic, Protocol, TypeVar

AUTO = "auto"
"""Name that detects the parser from the chat template."""


class _Parser(Protocol):
    @classmethod
    def matches(cls, template: str) -> bool: ...


P = TypeVar("P", bound=_Parser)


class ParserRegistry(Generic[P]):
    """Parser classes, instantiated without arguments: `builtin` classes, and entry points of other packages in `group`.

    aliases: alternative names of builtin parsers.
    words: special names, listed in error messages. kind: noun for error messages.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        builtin: Mapping[str, type[P]],
        aliases: Mapping[str, str],
        words: Sequence[str] = (AUTO,),
    ) -> None:
        self._kind = kind
        self._group = group
        self._builtin = builtin
        self._aliases = aliases
        self._words = words

    def find(self, name: str) -> P:
        """Return the parser of that name. Raises `ValueError` listing the known names."""
        parsers: dict[str, type[P]] = {**self._builtin, **entry_point_parsers(self._group)}
        name = self._aliases.get(name, name)
        if name not in parsers:
            known = ", ".join((*self._words, *sorted(parsers)))
            raise ValueError(f"unknown {self._kind} '{name}', known are {known}")
        return parsers[name]()

    def detect(self, template: str) -> P | None:
        """Return the parser whose `matches` accepts this chat template, or None. Entry points have precedence."""
        parsers: list[type[P]] = [*entry_point_parsers(self._group).values(), *self._builtin.values()]
        for parser in parsers:
            if parser.matches(template):
                return parser()
        return None


@cache
def entry_point_parsers(group: str) -> dict[str, Any]:
    """Load the parsers of other packages by name."""
    return {point.name: point.load() for point in entry_points(group=group)}
