"""What the readers of all formats have in common."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import orjson

from neso.frontends.openai.tool_parsers.base import (
    MAX_CALL_CHARS,
    Content,
    Function,
    ToolCallArguments,
    ToolCallStart,
    ToolEvent,
    ToolParser,
    ToolStream,
)
from neso.frontends.openai.tool_parsers.text_source import (
    NoCall,
    NotJson,
    ObjectScanner,
    Reading,
    TextSource,
    is_json_object,
    partial_end,
)

_NAME = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])+"'
_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*({_NAME})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')


class CallStream(ToolStream):
    """Reads content up to a marker, and what follows it by the format's coroutine `read_calls`.

    That one says `begin`, `arguments` and `end_call` for each call, and raises `NoCall` where the text is none: from
    behind the last call (or the marker) on it is content then. White space before a call and behind the last is
    dropped. Text that was tried as calls in vain is counted: beyond the limit of a call no more is tried, so that
    reading takes a time that is linear in the text.
    """

    markers: tuple[str, ...] = ()
    """What begins calls; none is the beginning of another."""
    opening: ClassVar[str] = ""
    """With this character a message begins that is calls without a marker."""

    def __init__(
        self, functions: Sequence[Function] = (), *, eager: bool = True, max_call_chars: int = MAX_CALL_CHARS
    ) -> None:
        self.functions = {function.name: function for function in functions}
        self.source = TextSource(max_call_chars)
        self._eager = eager
        self._marker = re.compile("|".join(map(re.escape, self.markers)) or r"(?!)")
        self._in_vain_left = max_call_chars
        self._events: list[ToolEvent] = []
        self._held: list[ToolEvent] = []  # of a call that is not certain yet
        self._calls = 0
        self._begun = False  # a call is announced, and not at its end
        self._cut_off = False
        self._content_end = 0  # of the source's text: content, should no call follow
        self._marked = False
        self._after_call = False  # nothing but white space since a call
        self._reading = self._read()
        next(self._reading)

    @abstractmethod
    def read_calls(self, marker: str) -> Reading[None]:
        """Read calls from behind `marker` on, "" where the message begins with `opening`. Raises `NoCall`."""

    def read_broken(self) -> Reading[None]:
        """Read on behind an announced call that turned out to be broken: drop what still belongs to it."""
        yield from ()

    # -- for those who feed it ----------------------------------------------------------------------------------

    def feed(self, text: str) -> list[ToolEvent]:
        self.source.text += text
        next(self._reading)
        return self._take_events()

    def finish(self) -> list[ToolEvent]:
        self.source.ended = True
        next(self._reading, None)
        return self._take_events()

    @property
    def cut_off(self) -> bool:
        return self._cut_off

    # -- for formats --------------------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """A call of the function `name` begins. Raises `NoCall` if that cannot be."""
        self.source.check()
        if not name or not (self._marked or self._knows(name)):
            raise NoCall
        self._held.append(ToolCallStart(self._calls, name))
        if self._eager:
            self._begun = True
            self._announce()

    def arguments(self, fragment: str) -> None:
        """More of the arguments of the call that has begun."""
        self._held.append(ToolCallArguments(self._calls, fragment))
        if self._eager:
            self._announce()

    def end_call(self) -> None:
        """The call is complete. Raises `NoCall` if it was not announced, and is not valid or too long."""
        if not self._eager:
            text = "".join(event.fragment for event in self._held if isinstance(event, ToolCallArguments))
            if not is_json_object(text):
                raise NoCall
        self._announce()
        self._begun = False
        self._calls += 1
        self._after_call = True
        self.source.start = 0

    def json_arguments(self) -> Reading[None]:
        """Take an object of JSON, and pass it on as the arguments while it comes. Raises `NoCall`."""
        if not self._eager:
            self.arguments((yield from self.source.json_object()))
            return
        source, scanner, scanned = self.source, ObjectScanner(), self.source.position
        while True:
            try:
                end = scanner.scan(source.text, scanned)
            except NotJson as error:
                self._pass_on(error.position)
                raise NoCall from None
            self._pass_on(len(source.text) if end is None else end)
            if end is not None:
                return
            scanned = source.position
            if not (yield from source.more()):
                raise NoCall

    def object_call(self) -> Reading[None]:
        """Take an object with a call's name and arguments, up to the end of these; its brace may follow.

        An object whose members come in another order is taken whole. Raises `NoCall`.
        """
        source, scanner = self.source, ObjectScanner()
        scanned = source.position
        while True:
            if head := _HEAD.match(source.text, source.position):
                source.position = head.end()
                self.begin(orjson.loads(head[1]))
                yield from self.json_arguments()
                self.end_call()
                # The closing brace, and members that follow the arguments.
                yield from self.rest_of_object()
                return
            try:
                end = scanner.scan(source.text, scanned)
            except NotJson as error:
                source.position = error.position
                raise NoCall from None
            if end is not None:
                break
            scanned = len(source.text)
            if not (yield from source.more()):
                source.position = scanned
                raise NoCall
        call = _read_call(source.text[source.position : end])
        source.position = end
        if call is None:
            raise NoCall
        self.begin(call[0])
        self.arguments(call[1])
        self.end_call()

    def rest_of_object(self) -> Reading[None]:
        """Take what follows the arguments in a call's object."""
        yield from self.source.json_object(opened=True)

    # -- the machine --------------------------------------------------------------------------------------------

    def _knows(self, name: str) -> bool:
        return not self.functions or name in self.functions

    def _read(self) -> Reading[None]:
        if self.opening:
            yield from self._read_opening()
        while (marker := (yield from self._read_content())) is not None:
            yield from self._try(marker)

    def _read_opening(self) -> Reading[None]:
        yield from self.source.space()
        if (yield from self.source.peek()) == self.opening:
            yield from self._try("")
        else:
            self.source.position = 0

    def _read_content(self) -> Reading[str | None]:
        """Pass text on up to a marker, which is taken; None at the end."""
        source = self.source
        while True:
            text = source.text
            found = self._marker.search(text) if self._in_vain_left >= 0 else None
            certain = text[: found.start()] if found else text[: len(text) - partial_end(text, self.markers)]
            content = certain.rstrip()
            self._content(content)
            if found:
                source.position = len(content)
                source.drop_read()
                source.position = found.end() - len(content)
                return found[0]
            if source.ended:
                if not (self._after_call and text.isspace()):
                    self._content(text[len(content) :])
                source.text = ""
                return None
            source.position = len(content)
            source.drop_read()
            yield

    def _try(self, marker: str) -> Reading[None]:
        """Read calls behind a marker; what is no call is content again."""
        source = self.source
        source.start = 0
        self._marked = bool(marker)
        self._content_end = source.position
        try:
            yield from self.read_calls(marker)
        except NoCall:
            if self._begun:
                yield from self._go_on_behind_broken()
            else:
                self._held.clear()
                self._in_vain_left -= len(marker) + source.position - self._content_end
                if source.over_limit:
                    self._in_vain_left = -1
                source.position = self._content_end
                self._content(source.text[: source.position])
        source.start = None
        source.drop_read()

    def _go_on_behind_broken(self) -> Reading[None]:
        """A call that is announced already is no call, or too long."""
        self._begun = False
        self._calls += 1
        self._after_call = True
        source = self.source
        self._cut_off = source.over_limit
        source.start = None
        if not self._cut_off:
            yield from self.read_broken()
            return
        while not source.ended:  # nothing more is said
            source.text = ""
            source.position = 0
            yield
        source.position = len(source.text)

    def _pass_on(self, end: int) -> None:
        """Pass the text up to `end` on as arguments, and no more than a call may have."""
        source = self.source
        assert source.start is not None, "arguments are a part of a call"
        allowed = source.limit + source.start - source.position
        fragment = source.text[source.position : min(end, source.position + max(allowed, 0))]
        source.position = end
        if fragment:
            self.arguments(fragment)
        source.drop_read()
        source.check()

    def _announce(self) -> None:
        """The events that were held are out: the text that they are of is no content any more."""
        self._events += self._held
        self._held.clear()
        self.source.drop_read()
        self._content_end = 0

    def _content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))
            self._after_call = False

    def _take_events(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events


class CallParser(ToolParser):
    """A format that a `CallStream` of one class reads."""

    stream_class: ClassVar[type[CallStream]]

    def stream(
        self, functions: Sequence[Function] = (), *, eager: bool = True, max_call_chars: int = MAX_CALL_CHARS
    ) -> ToolStream:
        return self.stream_class(functions, eager=eager, max_call_chars=max_call_chars)


def _read_call(text: str) -> tuple[str, str] | None:
    """The name and the arguments' JSON text of a call's object, None if it is no call."""
    try:
        call: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    name = call.get("name")
    key = "arguments" if "arguments" in call else "parameters"
    arguments = call.get(key)
    if not isinstance(name, str) or not name:
        return None
    if arguments is None:
        return name, "{}"
    if isinstance(arguments, str):  # some models write the arguments' text as a string, as the API does
        return (name, arguments) if is_json_object(arguments) else None
    if not isinstance(arguments, dict):
        return None
    try:
        exact = json.loads(text)[key]  # orjson rounds integers of more than 64 bits
        return name, json.dumps(exact, ensure_ascii=False)
    except RecursionError:  # of which orjson takes some more
        return None
