"""Text that comes in pieces, read by coroutines as if all of it were there."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Sequence
from typing import NoReturn, TypeVar

import orjson


def is_json_object(text: str) -> bool:
    """Whether `text` is an object of JSON."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def literal_json(text: str) -> str | None:
    """JSON text of a value that is written as JSON or as Python; None if it is neither, or JSON has no such value."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
            value.encode()  # half a surrogate pair is no text
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        return value
    return None


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


Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""A coroutine that yields where it needs more text, to be resumed when there is more or no more will come."""

_NOT_SPACE = re.compile(r"\S")


class NoCall(Exception):
    """The text is no call of the format."""


class TextSource:
    """The text from what is undecided on, and a place in it.

    `limit`: most characters from `start` to the place while `start` is set. Beyond it every coroutine raises `NoCall`,
    at the same character however the text comes.
    """

    def __init__(self, limit: int) -> None:
        self.text = ""
        self.position = 0
        self.ended = False
        self.start: int | None = None
        self.limit = limit

    @property
    def rest(self) -> int:
        """Characters from the place on."""
        return len(self.text) - self.position

    @property
    def over_limit(self) -> bool:
        """Whether what is read from `start` on is too long."""
        return self.start is not None and self.position - self.start > self.limit

    def drop_read(self) -> None:
        """Forget the text before the place."""
        self.text = self.text[self.position :]
        if self.start is not None:
            self.start -= self.position  # what is dropped counts on
        self.position = 0

    def check(self) -> None:
        """Raises `NoCall` if what is read from `start` on is too long."""
        if self.over_limit:
            raise NoCall

    def more(self) -> Reading[bool]:
        """Wait for more text, where all there is will be taken; False if there is none. Raises `NoCall`."""
        if self.start is not None and len(self.text) - self.start > self.limit:
            self.position = len(self.text)
            raise NoCall
        return (yield from self.wait())

    def wait(self) -> Reading[bool]:
        """Wait for more text; False if there is none."""
        if self.ended:
            return False
        yield
        return True

    def space(self) -> Reading[str]:
        """Take white space; what was taken."""
        begin = self.position
        while True:
            found = _NOT_SPACE.search(self.text, self.position)
            self.position = len(self.text) if found is None else found.start()
            if found is not None or not (yield from self.more()):
                self.check()
                return self.text[begin : self.position]

    def take(self, *options: str) -> Reading[str | None]:
        """Take the first of `options` that the text goes on with, longer ones before their beginnings; None if none."""
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
                # The text ends within an option; a shorter one may be there.
                shorter = [o for o in options if self.text.startswith(o, self.position)]
                self.position += len(shorter[0]) if shorter else 0
                return shorter[0] if shorter else None

    def expect(self, *options: str) -> Reading[str]:
        """Take one of `options`. Raises `NoCall` if none follows."""
        taken = yield from self.take(*options)
        if taken is None:
            raise NoCall
        return taken

    def peek(self) -> Reading[str]:
        """The next character, "" at the end."""
        while not self.rest:
            if not (yield from self.wait()):
                return ""
        return self.text[self.position]

    def matching(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take the longest text that `pattern` matches, which is a run of characters."""
        while True:
            found = pattern.match(self.text, self.position)
            end = self.position if found is None else found.end()
            if end < len(self.text) or not (yield from self.more()):
                taken = self.text[self.position : end]
                self.position = end
                self.check()
                return taken

    def up_to(self, *ends: str) -> Reading[tuple[str, str]]:
        """Take text up to the first of `ends`, and that: both. Raises `NoCall` if none comes."""
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
        """Drop text up to the first of `ends`, which is not taken, or to the end of all: which it was, "" for that."""
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
        """Take an object of JSON, whose first brace is taken already if `opened`. Raises `NoCall`.

        Whether it is valid is not looked at.
        """
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
        """Give up, and tell by the place how much was read for it."""
        self.position = position
        raise NoCall


def partial_end(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of one of `markers`, and not all of it."""
    longest = 0
    for marker in markers:
        # Most text has not even the first character of a marker.
        at = max(0, len(text) - len(marker) + 1)
        while (at := text.find(marker[0], at, len(text) - longest)) >= 0:
            if marker.startswith(text[at:]):
                longest = len(text) - at
                break
            at += 1
    return longest
