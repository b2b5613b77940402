"""Incremental reading of text by coroutines, and scanning of JSON in the text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Sequence
from typing import NoReturn, TypeVar

import orjson


def is_json_object(text: str) -> bool:
    """Whether `text` is a JSON object."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def literal_json(text: str) -> str | None:
    """Convert a JSON or Python literal to JSON text; None for other text, or a value not representable in JSON."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
            value.encode()  # raises for a lone surrogate
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        return value
    return None


_STRUCTURE = re.compile(r'["{}\[\]]|[^\w\s,:+.\-]')
"""Relevant characters outside strings: structural characters, and characters that JSON does not allow."""
_BEGINNING = re.compile(r"\S")
_IN_STRING = re.compile(r'["\\]')


class NotJson(ValueError):
    """The text is not a JSON object: invalid character at `position`."""

    def __init__(self, position: int) -> None:
        super().__init__(f"invalid JSON at {position}")
        self.position = position


class ObjectScanner:
    """Finds the end of a JSON object whose text arrives in pieces, by matching brackets and strings.

    Rejects only invalid characters and unmatched brackets; it does not validate the object.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False

    def scan(self, text: str, start: int = 0) -> int | None:
        """Scan `text[start:]`. Returns the index after the object's end, or None if it has not ended.

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
                self._update(found[0], found.start())
                if not self._open:
                    return position
        return None

    @property
    def _pattern(self) -> re.Pattern[str]:
        """Return the pattern of the next relevant character."""
        if self._in_string:
            return _IN_STRING
        return _STRUCTURE if self._open else _BEGINNING

    def _update(self, character: str, position: int) -> None:
        """Process a character outside strings."""
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


Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""A coroutine that yields when it needs more text; it is resumed when text arrives, or at the end of the text."""

_NOT_SPACE = re.compile(r"\S")


class NoCall(Exception):
    """The text is not a call in this format."""


class TextSource:
    """Incrementally arriving text with a read position. Consumed text can be dropped.

    limit: maximum characters from `start` to `position` while `start` is set. Above the limit, every coroutine raises
        `NoCall`, at the same character for any split of the text.
    """

    def __init__(self, limit: int) -> None:
        self.text = ""
        self.position = 0
        self.ended = False
        self.start: int | None = None
        self.limit = limit

    @property
    def rest(self) -> int:
        """Number of characters after the position."""
        return len(self.text) - self.position

    @property
    def over_limit(self) -> bool:
        """Whether the text since `start` is too long."""
        return self.start is not None and self.position - self.start > self.limit

    def drop_read(self) -> None:
        """Drop the text before the position."""
        self.text = self.text[self.position :]
        if self.start is not None:
            self.start -= self.position  # dropped text still counts
        self.position = 0

    def check(self) -> None:
        """Raise `NoCall` if the text since `start` is too long."""
        if self.over_limit:
            raise NoCall

    def more(self) -> Reading[bool]:
        """Consume all text and wait for more; False at the end. Raises `NoCall` above the limit."""
        if self.start is not None and len(self.text) - self.start > self.limit:
            self.position = len(self.text)
            raise NoCall
        return (yield from self.wait())

    def wait(self) -> Reading[bool]:
        """Wait for more text; False at the end."""
        if self.ended:
            return False
        yield
        return True

    def space(self) -> Reading[str]:
        """Consume and return whitespace."""
        begin = self.position
        while True:
            found = _NOT_SPACE.search(self.text, self.position)
            self.position = len(self.text) if found is None else found.start()
            if found is not None or not (yield from self.more()):
                self.check()
                return self.text[begin : self.position]

    def take(self, *options: str) -> Reading[str | None]:
        """Consume the first of `options` that follows, or None. List longer options before their prefixes."""
        while True:
            undecided = False
            for option in options:
                if self.text.startswith(option, self.position):
                    self.position += len(option)
                    self.check()
                    return option
                if self.rest < len(option) and option.startswith(self.text[self.position :]):
                    undecided = True
                    break
            if not undecided:
                return None
            if not (yield from self.wait()):
                # The text ends within an option; a shorter one may match.
                shorter = [o for o in options if self.text.startswith(o, self.position)]
                self.position += len(shorter[0]) if shorter else 0
                return shorter[0] if shorter else None

    def expect(self, *options: str) -> Reading[str]:
        """Consume one of `options`. Raises `NoCall` if none follows."""
        taken = yield from self.take(*options)
        if taken is None:
            raise NoCall
        return taken

    def peek(self) -> Reading[str]:
        """Return the next character, or "" at the end."""
        while not self.rest:
            if not (yield from self.wait()):
                return ""
        return self.text[self.position]

    def matching(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Consume the longest match of `pattern`, a repeated character class."""
        while True:
            found = pattern.match(self.text, self.position)
            end = self.position if found is None else found.end()
            if end < len(self.text) or not (yield from self.more()):
                taken = self.text[self.position : end]
                self.position = end
                self.check()
                return taken

    def up_to(self, *ends: str) -> Reading[tuple[str, str]]:
        """Consume text up to the first of `ends`. Returns the text and the end. Raises `NoCall` if none is found."""
        longest = max(map(len, ends))
        searched = self.position
        while True:
            found = [(at, end) for end in ends if (at := self.text.find(end, searched)) >= 0]
            if found:
                at, end = min(found)
                taken = self.text[self.position : at]
                self.position = at + len(end)
                self.check()
                return taken, end
            searched = max(self.position, len(self.text) - longest + 1)
            if not (yield from self.more()):
                self._fail_at(len(self.text))

    def skip_to(self, *ends: str) -> Reading[str]:
        """Drop text before the first of `ends`. Returns that end without consuming it; "" at the end of the text."""
        self.start = None
        ends_pattern = re.compile("|".join(map(re.escape, ends)))
        while True:
            if found := ends_pattern.search(self.text, self.position):
                self.position = found.start()
                return found[0]
            self.position = len(self.text) - partial_end(self.text[self.position :], ends)
            self.drop_read()
            if not (yield from self.wait()):
                self.position = len(self.text)
                return ""

    def json_object(self, *, opened: bool = False) -> Reading[str]:
        """Consume a JSON object without validation. `opened`: the first brace is already consumed. Raises `NoCall`."""
        scanner = ObjectScanner()
        if opened:
            scanner.scan("{")
        begin = scanned = self.position
        while True:
            try:
                end = scanner.scan(self.text, scanned)
            except NotJson as error:
                self._fail_at(error.position)
            if end is not None:
                self.position = end
                self.check()
                return self.text[begin:end]
            scanned = len(self.text)
            if not (yield from self.more()):
                self._fail_at(len(self.text))

    def _fail_at(self, position: int) -> NoReturn:
        """Raise `NoCall`, with the position after the examined text."""
        self.position = position
        raise NoCall


def partial_end(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of one of `markers`."""
    longest = 0
    for marker in markers:
        # Search for the first character: most text does not contain it.
        at = max(0, len(text) - len(marker) + 1)
        while (at := text.find(marker[0], at, len(text) - longest)) >= 0:
            if marker.startswith(text[at:]):
                longest = len(text) - at
                break
            at += 1
    return longest
