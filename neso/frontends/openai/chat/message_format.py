"""The formats of the answers to chats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from neso.frontends.openai.chat.prompt import ToolUse
from neso.frontends.openai.errors import ApiError, invalid
from neso.frontends.openai.model_resolver import Target
from neso.frontends.openai.parser_registry import AUTO
from neso.frontends.openai.reasoning_parsers import (
    ReasoningParser,
    ReasoningStream,
    Split,
    detect_reasoning_parser,
    find_reasoning_parser,
)
from neso.frontends.openai.request_params import wanted_form
from neso.frontends.openai.schemas import ChatCompletionRequest
from neso.frontends.openai.tool_parsers import (
    MAX_CALL_CHARS,
    Content,
    ToolCallStart,
    ToolEvent,
    ToolParser,
    ToolStream,
    detect_tool_parser,
    find_tool_parser,
)
from neso.frontends.openai.tool_parsers.forms import Form, const, either, json_form, sequence, text_before
from neso.frontends.openai_options import OpenAIOptions
from neso.generation import GuidedDecoding
from neso.server.config.model_config import string_parameter
from neso.server.errors import InvalidArgument

TOOL_PARAMETER, REASONING_PARAMETER = "tool_call_parser", "reasoning_parser"
"""They go before the server's options."""


def check_parsers(config: Any) -> None:
    """Raises `InvalidArgument` for a parser that there is not."""
    if TOOL_PARAMETER not in config.parameters and REASONING_PARAMETER not in config.parameters:
        return
    # It takes a moment, and few models name parsers.
    from neso.frontends.openai.chat.message_format import make_dialect

    try:
        make_dialect(
            string_parameter(config, TOOL_PARAMETER, AUTO),
            string_parameter(config, REASONING_PARAMETER, AUTO),
            "",
        )
    except ValueError as error:
        raise InvalidArgument(f"model '{config.name}': {error}") from None


@dataclass(frozen=True, slots=True)
class Dialect:
    """The parsers for one model's messages; `reasoning` None for a model that does not reason."""

    tools: ToolParser
    reasoning: ReasoningParser | None


class Dialects:
    """The dialects of the server's models: as their configuration says, the server's options, or their template."""

    def __init__(self, options: OpenAIOptions) -> None:
        """Raises `ValueError` for a parser that there is not."""
        self._options = options
        make_dialect(options.tool_call_parser, options.reasoning_parser, "")

    def of(self, target: Target) -> Dialect:
        """The dialect of a model. Raises `ApiError` if its configuration names a parser that there is not."""
        config, options = target.model.config, self._options
        tools = string_parameter(config, TOOL_PARAMETER, options.tool_call_parser)
        reasoning = string_parameter(config, REASONING_PARAMETER, options.reasoning_parser)
        try:
            return make_dialect(tools, reasoning, target.text.chat_template_source)
        except ValueError as error:
            raise ApiError(500, f"model '{target.model.name}': {error}") from None


@lru_cache(256)
def make_dialect(tools: str, reasoning: str, template: str) -> Dialect:
    """Of parsers by name, "auto" of what `template` tells. Raises `ValueError` for a parser that there is not."""
    return Dialect(
        detect_tool_parser(template) if tools == AUTO else find_tool_parser(tools),
        detect_reasoning_parser(template) if reasoning == AUTO else find_reasoning_parser(reasoning),
    )


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


MessageEvent = Reasoning | ToolEvent


class Message:
    """Events, joined."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def add(self, events: Iterable[MessageEvent]) -> None:
        """Take events in."""
        for event in events:
            if isinstance(event, Reasoning):
                self._reasoning.append(event.text)
            elif isinstance(event, Content):
                self._content.append(event.text)
            elif isinstance(event, ToolCallStart):
                self._calls.append((event.name, []))
            else:
                self._calls[event.index][1].append(event.fragment)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Name and JSON text of the arguments of each."""
        return [(name, "".join(arguments)) for name, arguments in self._calls]


class MessageReader:
    """Reads one message while it is generated. The events, joined, do not depend on how the text was cut.

    Without `reasoning` or `tools` there is none of it. Unless `many_calls`, only the first call is told of.
    """

    def __init__(
        self,
        reasoning: ReasoningStream | None = None,
        tools: ToolStream | None = None,
        *,
        many_calls: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._many_calls = many_calls
        self.num_reasoning_tokens = 0

    def feed(self, text: str, num_tokens: int = 0) -> list[MessageEvent]:
        """What more text makes known; it was made of `num_tokens`, which are counted while the model reasons."""
        if self._reasoning is None:
            return self._answer(text)
        reasoned = self._reasoning.reasoning
        split = self._reasoning.feed(text)
        if reasoned or self._reasoning.reasoning or split.reasoning:
            self.num_reasoning_tokens += num_tokens
        return self._events(split)

    def finish(self) -> list[MessageEvent]:
        """What is known once there is no more text."""
        events = [] if self._reasoning is None else self._events(self._reasoning.finish())
        return events if self._tools is None else [*events, *self._kept(self._tools.finish())]

    @property
    def cut_off(self) -> bool:
        """Whether a call that was told of has been cut off because it was too long."""
        return self._tools is not None and self._tools.cut_off

    def _events(self, split: Split) -> list[MessageEvent]:
        events: list[MessageEvent] = [Reasoning(split.reasoning)] if split.reasoning else []
        return [*events, *self._answer(split.content)]

    def _answer(self, text: str) -> list[MessageEvent]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._kept(self._tools.feed(text))

    def _kept(self, events: list[ToolEvent]) -> list[MessageEvent]:
        return [
            event for event in events if self._many_calls or isinstance(event, Content) or event.index == 0
        ]


_SPACE = {"type": "regex", "pattern": r"[ \n]{0,4}"}


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The dialect of a model, what it may call, and the prompt that it answers."""

    dialect: Dialect
    tool_use: ToolUse = field(default_factory=ToolUse)
    prompt: str = ""
    asked: GuidedDecoding | None = None
    """The form that the client wants the answer to have."""
    max_call_chars: int = MAX_CALL_CHARS

    def reader(self, *, eager: bool) -> MessageReader:
        """A reader for one answer; an eager one tells of calls while they are written (see `ToolParser.stream`)."""
        tool_use = self.tool_use
        tools = None
        if tool_use.mode != "none":
            tools = self.dialect.tools.stream(
                tool_use.functions, eager=eager, max_call_chars=self.max_call_chars
            )
        reasoning = self.dialect.reasoning if self._may_reason else None
        return MessageReader(
            None if reasoning is None else reasoning.stream(self.prompt),
            tools,
            many_calls=tool_use.many_calls,
        )

    @property
    def shown_special_tokens(self) -> tuple[str, ...]:
        """Special tokens that the readers need to see."""
        tools = self.dialect.tools.special_tokens if self.tool_use.mode != "none" else ()
        reasoning = self.dialect.reasoning.special_tokens if self.dialect.reasoning is not None else ()
        return (*tools, *reasoning)

    @property
    def guided_decoding(self) -> GuidedDecoding | None:
        """The form of the whole answer: what the client wants, or calls, behind reasoning. Raises `ApiError`."""
        calls = self._calls_form()
        if calls is not None and self.asked is not None and self.tool_use.mode == "required":
            raise invalid("tool_choice", "'tool_choice' is given, and another form of the answer, too.")
        if self.asked is not None:
            source_field = self.asked.field
            may_call = self.tool_use.mode == "auto" and source_field == "response_format"
            if self.asked.kind == "grammar" or not (may_call or self.dialect.reasoning):
                return self.asked
            form = _form_of(self.asked)
            if may_call:  # as with OpenAI, an answer has the form, and a call that of calls
                form = either(form, self._forced_calls())
        elif calls is not None:
            form, source_field = calls, "tools"
        else:
            return None
        tag = {"type": "structural_tag", "format": self._behind_reasoning(form)}
        return GuidedDecoding(structural_tag=tag, source_field=source_field)

    @property
    def _may_reason(self) -> bool:
        """A grammar of the client's cannot be put behind reasoning: the answer has its form from the start."""
        return self.asked is None or self.asked.kind != "grammar"

    def _calls_form(self) -> Form | None:
        tool_use = self.tool_use
        if tool_use.mode == "required":
            return self._forced_calls()
        if tool_use.mode == "auto" and any(function.strict for function in tool_use.functions):
            return self.dialect.tools.free_form(tool_use.functions, many_calls=tool_use.many_calls)
        return None

    def _forced_calls(self) -> Form:
        return self.dialect.tools.forced_form(self.tool_use.functions, many_calls=self.tool_use.many_calls)

    def _behind_reasoning(self, form: Form) -> Form:
        reasoning = self.dialect.reasoning
        if reasoning is None:
            return form
        end = either(*map(text_before, reasoning.closes))
        if reasoning.begins_inside(self.prompt):
            return sequence(end, _SPACE, form)
        if reasoning.is_closed(self.prompt):
            return form
        thoughts = sequence(either(*map(const, reasoning.opens)), end, _SPACE)
        return sequence(either(thoughts, const("")), form)


def _form_of(asked: GuidedDecoding) -> Form:
    """A structural tag's form of what a client wants, which is no grammar."""
    forms: dict[str, Callable[[], Form]] = {
        "json": lambda: json_form(_schema(asked)),
        "json_object": lambda: json_form(_schema(asked)),
        "regex": lambda: {"type": "regex", "pattern": asked.regex},
        "choice": lambda: either(*map(const, asked.choice or ())),
        "structural_tag": lambda: json.loads(str(asked.structural_tag)),
    }
    return forms[asked.kind]()


def _schema(asked: GuidedDecoding) -> dict[str, Any]:
    """The schema, with what is asked for of white space in the way that llguidance reads it."""
    schema: Any = json.loads(asked.json) if isinstance(asked.json, str) else {"type": "object"}
    if not isinstance(schema, dict):
        schema = {"type": "object"}
    own = schema.get("x-guidance")
    options: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    if asked.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if asked.whitespace_pattern is not None:
        options["whitespace_pattern"] = asked.whitespace_pattern
    return {**schema, "x-guidance": options} if options else schema


class MessageFormats:
    """Says how the answer to a chat is written by its model."""

    def __init__(self, options: OpenAIOptions) -> None:
        """Raises `ValueError` for options that name parsers that there are not."""
        self._dialects = Dialects(options)
        self._max_call_chars = options.max_tool_call_parse_bytes

    def of(
        self, request: ChatCompletionRequest, tool_use: ToolUse, target: Target, prompt: str
    ) -> MessageFormat:
        """The format of the answer to `prompt`, which is the chat as the model sees it. Raises `ApiError`."""
        return MessageFormat(
            self._dialects.of(target), tool_use, prompt, wanted_form(request), self._max_call_chars
        )
