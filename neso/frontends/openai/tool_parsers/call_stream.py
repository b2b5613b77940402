"""Base class of the parsers of all formats."""

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
from neso.frontends.openai.tool_parsers.text_reader import (
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
    """Forwards content up to a marker, and parses the following text with the format's coroutine `read_calls`.

    `read_calls` calls `begin`, `arguments` and `end_call` for each call, and raises `NoCall` if the text is not a call;
    the text after the last call (or the marker) is then content. Whitespace before a call and after the last call is
    dropped. Text that could not be parsed as a call counts towards the limit `max_call_chars`. Above the limit, markers
    are ignored, so that the total time is linear in the length of the text.
    """

    markers: tuple[str, ...] = ()
    """Texts that start calls; none is a prefix of another."""
    opening: ClassVar[str] = ""
    """First character of a message that consists of calls without a marker; "" if the format has no such messages."""

    def __init__(
        self, functions: Sequence[Function] = (), *, eager: bool = True, max_call_chars: int = MAX_CALL_CHARS
    ) -> None:
        self.functions = {function.name: function for function in functions}
        self.source = TextSource(max_call_chars)
        self._eager = eager
        self._marker = re.compile("|".join(map(re.escape, self.markers)) or r"(?!)")
        self._failed_chars_left = max_call_chars
        self._events: list[ToolEvent] = []
        self._held: list[ToolEvent] = []  # events of a call that may still be invalid
        self._calls = 0
        self._is_open = False  # a call is reported and not yet complete
        self._cut_off = False
        self._content_end = 0  # end of the text that is content if no call follows
        self._marked = False
        self._after_call = False  # only whitespace since the last call
        self._reading = self._read()
        next(self._reading)

    @abstractmethod
    def read_calls(self, marker: str) -> Reading[None]:
        """Parse calls after `marker`; "" if the message begins with `opening`. Raises `NoCall`."""

    def read_broken(self) -> Reading[None]:
        """Drop the rest of a reported call that is invalid."""
        yield from ()

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

    # Called by `read_calls`.

    def begin(self, name: str) -> None:
        """Start a call of the function `name`. Raises `NoCall` if the name is unknown or too long."""
        self.source.check()
        if not name or not (self._marked or self._knows(name)):
            raise NoCall
        self._held.append(ToolCallStart(self._calls, name))
        if self._eager:
            self._is_open = True
            self._report()

    def arguments(self, fragment: str) -> None:
        """Append to the arguments of the current call."""
        self._held.append(ToolCallArguments(self._calls, fragment))
        if self._eager:
            self._report()

    def end_call(self) -> None:
        """Complete the current call. Raises `NoCall` if it is not yet reported and its arguments are invalid."""
        if not self._eager:
            text = "".join(event.fragment for event in self._held if isinstance(event, ToolCallArguments))
            if not is_json_object(text):
                raise NoCall
        self._report()
        self._is_open = False
        self._calls += 1
        self._after_call = True
        self.source.start = 0

    def json_arguments(self) -> Reading[None]:
        """Parse a JSON object, and forward it as arguments while it arrives. Raises `NoCall`."""
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
        """Parse an object with a call's name and arguments. Raises `NoCall`.

        If the arguments do not follow the name directly, the object is parsed as a whole.
        """
        source, scanner = self.source, ObjectScanner()
        scanned = source.position
        while True:
            if head := _HEAD.match(source.text, source.position):
                source.position = head.end()
                self.begin(orjson.loads(head[1]))
                yield from self.json_arguments()
                self.end_call()
                # Members after the arguments, and the closing brace.
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
        """Parse the rest of a call's object after the arguments."""
        yield from self.source.json_object(opened=True)

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
        """Forward content up to the next marker. Returns the marker, or None at the end of the text."""
        source = self.source
        while True:
            text = source.text
            found = self._marker.search(text) if self._failed_chars_left >= 0 else None
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
        """Parse calls after a marker; without calls, the text is content."""
        source = self.source
        source.start = 0
        self._marked = bool(marker)
        self._content_end = source.position
        try:
            yield from self.read_calls(marker)
        except NoCall:
            if self._is_open:
                yield from self._recover()
            else:
                self._held.clear()
                self._failed_chars_left -= len(marker) + source.position - self._content_end
                if source.over_limit:
                    self._failed_chars_left = -1
                source.position = self._content_end
                self._content(source.text[: source.position])
        source.start = None
        source.drop_read()

    def _recover(self) -> Reading[None]:
        """Continue after a reported call that is invalid or too long."""
        self._is_open = False
        self._calls += 1
        self._after_call = True
        source = self.source
        self._cut_off = source.over_limit
        source.start = None
        if not self._cut_off:
            yield from self.read_broken()
            return
        while not source.ended:  # the rest of the message is dropped
            source.text = ""
            source.position = 0
            yield
        source.position = len(source.text)

    def _pass_on(self, end: int) -> None:
        """Forward the text up to `end` as arguments, within the maximum length of a call."""
        source = self.source
        assert source.start is not None, "within a call"
        allowed = source.limit + source.start - source.position
        fragment = source.text[source.position : min(end, source.position + max(allowed, 0))]
        source.position = end
        if fragment:
            self.arguments(fragment)
        source.drop_read()
        source.check()

    def _report(self) -> None:
        """Report the held events; their text can no longer become content."""
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
    """A format whose stream is a `CallStream`."""

    stream_class: ClassVar[type[CallStream]]

    def stream(
        self, functions: Sequence[Function] = (), *, eager: bool = True, max_call_chars: int = MAX_CALL_CHARS
    ) -> ToolStream:
        return self.stream_class(functions, eager=eager, max_call_chars=max_call_chars)


def _read_call(text: str) -> tuple[str, str] | None:
    """Read name and arguments (JSON text) of a call's object; None if it is not a call."""
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
    if isinstance(arguments, str):  # some models write the arguments as a JSON string
        return (name, arguments) if is_json_object(arguments) else None
    if not isinstance(arguments, dict):
        return None
    try:
        exact = json.loads(text)[key]  # orjson rounds integers of more than 64 bits
        return name, json.dumps(exact, ensure_ascii=False)
    except RecursionError:  # nested deeper than `json` supports
        return None
