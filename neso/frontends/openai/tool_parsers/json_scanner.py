"""Finds the end of a JSON object whose text comes in pieces."""

from __future__ import annotations

import re

_STRUCTURE = re.compile(r'["{}\[\]]|[^\w\s,:+.\-]')
"""Outside strings: a character that matters, or one that JSON has no place for."""
_BEGINNING = re.compile(r"\S")
_IN_STRING = re.compile(r'["\\]')


class NotJson(ValueError):
    """The text cannot be an object of JSON: the character at `position` has no place there."""

    def __init__(self, position: int) -> None:
        super().__init__(f"no JSON at {position}")
        self.position = position


class ObjectScanner:
    """Follows brackets and strings from the opening brace of an object to its closing one.

    It refuses only what is plainly no JSON (a stray sign, a bracket that does not match), which is enough to
    stop early; whether the object is valid is for a real parser to say.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False

    def scan(self, text: str, start: int = 0) -> int | None:
        """Read on through `text[start:]`: the index after the object's end, or None if it goes on.

        Raises `NotJson`.
        """
        position = start
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            found = self._pattern.search(text, position)
            if found is None:
                return None
            position = found.end()
            if self._in_string:
                self._escaped = found[0] == "\\"
                self._in_string = self._escaped
            else:
                self._note(found[0], found.start())
                if not self._open:
                    return position
        return None

    @property
    def _pattern(self) -> re.Pattern[str]:
        """Finds the next character that matters."""
        if self._in_string:
            return _IN_STRING
        return _STRUCTURE if self._open else _BEGINNING

    def _note(self, character: str, position: int) -> None:
        """Take note of a character outside strings."""
        if not self._open and character != "{":
            raise NotJson(position)
        if character == '"':
            self._in_string = True
        elif character == "{":
            self._open.append("}")
        elif character == "[":
            self._open.append("]")
        elif self._open.pop() != character:
            raise NotJson(position)
