"""Format of chat messages: parsing and constraints of reasoning, content and tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from neso.frontends.openai.chat.prompt import ToolUse
from neso.frontends.openai.chat.schemas import ChatCompletionRequest
from neso.frontends.openai.errors import ApiError, invalid
from neso.frontends.openai.model_resolver import ResolvedModel
from neso.frontends.openai.parser_registry import AUTO
from neso.frontends.openai.reasoning_parsers import (
    ReasoningParser,
    ReasoningStream,
    Split,
    detect_reasoning_parser,
    find_reasoning_parser,
)
from neso.frontends.openai.request_params import guided_decoding_of
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
from neso.frontends.openai.tool_parsers.structural_tags import (
    Form,
    const,
    either,
    format_of,
    json_form,
    sequence,
    text_before,
    triggered_by_either,
)
from neso.frontends.openai_options import OpenAIOptions
from neso.generation import GuidedDecoding
from neso.server.config.model_config import string_parameter
from neso.server.errors import InvalidArgument

TOOL_PARAMETER, REASONING_PARAMETER = "tool_call_parser", "reasoning_parser"
"""Parameters of a model's configuration that override the server's options."""
_WHITESPACE = {"type": "regex", "pattern": r"[ \n]{0,4}"}


@dataclass(frozen=True, slots=True)
class ModelParsers:
    """The parsers of a model's messages. `reasoning`: None for a model that does not reason."""

    tools: ToolParser
    reasoning: ReasoningParser | None

    @staticmethod
    @lru_cache(256)
    def find(tools: str, reasoning: str, template: str) -> ModelParsers:
        """Find parsers by name; "auto" detects them from the chat template. Raises `ValueError` for an unknown name."""
        return ModelParsers(
            detect_tool_parser(template) if tools == AUTO else find_tool_parser(tools),
            detect_reasoning_parser(template) if reasoning == AUTO else find_reasoning_parser(reasoning),
        )


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning text."""

    text: str


MessageEvent = Reasoning | ToolEvent


class Message:
    """A message joined from events."""

    def __init__(self, events: Iterable[MessageEvent] = ()) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []
        self.add(events)

    def add(self, events: Iterable[MessageEvent]) -> None:
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
        """Name and arguments (JSON text) of each call."""
        return [(name, "".join(arguments)) for name, arguments in self._calls]


class MessageParser:
    """Parses a message incrementally. The joined events do not depend on how the text was split.

    Without `reasoning` or `tools` the text has none. Unless `many_calls`, only the first call is reported.
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
        self.cut_off = False
        """Whether a reported call was truncated because it exceeded the maximum length."""

    @property
    def is_active(self) -> bool:
        """Whether text is parsed. Otherwise all text is content."""
        return self._reasoning is not None or self._tools is not None

    def feed(self, text: str, num_tokens: int = 0) -> list[MessageEvent]:
        """Parse more text, which has `num_tokens` tokens. Returns its events."""
        if self._reasoning is None:
            if self._tools is None:
                return [Content(text)] if text else []
            return self._content_events(text)
        was_reasoning = self._reasoning.reasoning
        split = self._reasoning.feed(text)
        if was_reasoning or self._reasoning.reasoning or split.reasoning:
            self.num_reasoning_tokens += num_tokens
        return self._split_events(split)

    def finish(self) -> list[MessageEvent]:
        """End the text. Returns the remaining events."""
        events = [] if self._reasoning is None else self._split_events(self._reasoning.finish())
        return events if self._tools is None else [*events, *self._kept(self._tools, self._tools.finish())]

    def _split_events(self, split: Split) -> list[MessageEvent]:
        events: list[MessageEvent] = [Reasoning(split.reasoning)] if split.reasoning else []
        return [*events, *self._content_events(split.content)]

    def _content_events(self, text: str) -> list[MessageEvent]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._kept(self._tools, self._tools.feed(text))

    def _kept(self, tools: ToolStream, events: list[ToolEvent]) -> list[MessageEvent]:
        self.cut_off = tools.cut_off
        return [
            event for event in events if self._many_calls or isinstance(event, Content) or event.index == 0
        ]


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """Format of the message generated for `prompt`.

    guided: the output format requested by the client.
    max_call_chars: longest tool call that is parsed.
    """

    parsers: ModelParsers
    tool_use: ToolUse = field(default_factory=ToolUse)
    prompt: str = ""
    guided: GuidedDecoding | None = None
    max_call_chars: int = MAX_CALL_CHARS

    def parser(self, *, eager: bool) -> MessageParser:
        """Create a parser for one message; `eager` as in `ToolParser.stream`."""
        tool_use = self.tool_use
        tools = None
        if tool_use.mode != "none":
            tools = self.parsers.tools.stream(
                tool_use.functions, eager=eager, max_call_chars=self.max_call_chars
            )
        # A grammar of the client applies from the start of the message.
        is_grammar = self.guided is not None and self.guided.kind == "grammar"
        reasoning = None if is_grammar else self.parsers.reasoning
        return MessageParser(
            None if reasoning is None else reasoning.stream(self.prompt),
            tools,
            many_calls=tool_use.many_calls,
        )

    @property
    def shown_special_tokens(self) -> tuple[str, ...]:
        """Special tokens that the parsers need in the text."""
        tools = self.parsers.tools.special_tokens if self.tool_use.mode != "none" else ()
        reasoning = self.parsers.reasoning.special_tokens if self.parsers.reasoning is not None else ()
        return (*tools, *reasoning)

    @property
    def guided_decoding(self) -> GuidedDecoding | None:
        """Return the constraint of the message: requested format or tool calls, after reasoning. Raises `ApiError`."""
        tool_use, guided = self.tool_use, self.guided
        if guided is not None and tool_use.mode == "required":
            raise invalid(
                "tool_choice",
                "'tool_choice' cannot be combined with another output format.",
            )
        if guided is not None:
            source_field = guided.field
            may_call = tool_use.mode == "auto" and source_field == "response_format"
            if guided.kind == "grammar" or not (may_call or self.parsers.reasoning):
                return guided
            form = _form_of(guided)
            if may_call:
                form = self._or_calls(form)
        elif tool_use.mode == "required":
            form, source_field = self._forced_calls(), "tools"
        elif tool_use.mode == "auto" and any(function.strict for function in tool_use.functions):
            free = self.parsers.tools.free_form(tool_use.functions, many_calls=tool_use.many_calls)
            if free is None:
                return None
            form, source_field = free, "tools"
        else:
            return None
        tag = {"type": "structural_tag", "format": self._after_reasoning(form)}
        return GuidedDecoding(structural_tag=tag, source_field=source_field)

    def _forced_calls(self) -> Form:
        return self.parsers.tools.forced_form(self.tool_use.functions, many_calls=self.tool_use.many_calls)

    def _or_calls(self, form: Form) -> Form:
        """Match either the requested format or calls, as in the OpenAI API; with free text, both in one message.

        xgrammar does not support free text as one of several alternatives.
        """
        free = self.parsers.tools.free_form(self.tool_use.functions, many_calls=self.tool_use.many_calls)
        merged = None if free is None else triggered_by_either(form, free)
        return either(form, self._forced_calls()) if merged is None else merged

    def _after_reasoning(self, form: Form) -> Form:
        reasoning = self.parsers.reasoning
        if reasoning is None:
            return form
        end = either(*map(text_before, reasoning.closes))
        if reasoning.begins_inside(self.prompt):
            return sequence(end, _WHITESPACE, form)
        if reasoning.is_closed(self.prompt):
            return form
        optional = sequence(either(*map(const, reasoning.opens)), end, _WHITESPACE)
        return sequence(either(optional, const("")), form)


class MessageFormats:
    """Selects the message format of a request by the model's configuration, the server's options and the template."""

    def __init__(self, options: OpenAIOptions) -> None:
        """Raises `ValueError` for an unknown parser."""
        self._options = options
        ModelParsers.find(options.tool_call_parser, options.reasoning_parser, "")

    def of(
        self, request: ChatCompletionRequest, tool_use: ToolUse, model: ResolvedModel, prompt: str
    ) -> MessageFormat:
        """Return the format of the message for `prompt`. Raises `ApiError`."""
        config, options = model.model.config, self._options
        tools = string_parameter(config, TOOL_PARAMETER, options.tool_call_parser)
        reasoning = string_parameter(config, REASONING_PARAMETER, options.reasoning_parser)
        try:
            parsers = ModelParsers.find(tools, reasoning, model.tokenizer.chat_template_source)
        except ValueError as error:
            raise ApiError(500, f"model '{model.model.name}': {error}") from None
        guided = guided_decoding_of(request)
        return MessageFormat(parsers, tool_use, prompt, guided, options.max_tool_call_parse_bytes)


def check_parser_parameters(config: Any) -> None:
    """Raise `InvalidArgument` if a model configuration names an unknown parser."""
    tools = string_parameter(config, TOOL_PARAMETER, AUTO)
    reasoning = string_parameter(config, REASONING_PARAMETER, AUTO)
    try:
        ModelParsers.find(tools, reasoning, "")
    except ValueError as error:
        raise InvalidArgument(f"model '{config.name}': {error}") from None


def _form_of(guided: GuidedDecoding) -> Form:
    """Convert a requested output format other than a grammar to a structural-tag format."""
    forms: dict[str, Callable[[], Form]] = {
        "json": lambda: json_form(_schema(guided)),
        "json_object": lambda: json_form(_schema(guided)),
        "regex": lambda: {"type": "regex", "pattern": guided.regex},
        "choice": lambda: either(*map(const, guided.choice or ())),
        "structural_tag": lambda: format_of(json.loads(str(guided.structural_tag))),
    }
    return forms[guided.kind]()


def _schema(guided: GuidedDecoding) -> dict[str, Any]:
    """Return the JSON schema, with the whitespace options in llguidance's `x-guidance`."""
    schema: Any = json.loads(guided.json) if isinstance(guided.json, str) else {"type": "object"}
    if not isinstance(schema, dict):
        schema = {"type": "object"}
    own = schema.get("x-guidance")
    options: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    if guided.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if guided.whitespace_pattern is not None:
        options["whitespace_pattern"] = guided.whitespace_pattern
    return {**schema, "x-guidance": options} if options else schema
