"""How the answer to one prompt is written, and how it is to be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from neso.frontends.openai.chat.dialects import Dialect
from neso.frontends.openai.chat.message_reader import MessageReader
from neso.frontends.openai.chat.tool_use import ToolUse
from neso.frontends.openai.errors import invalid
from neso.frontends.openai.tool_parsers import MAX_CALL_CHARS
from neso.frontends.openai.tool_parsers.forms import Form, const, either, json_form, sequence, text_before
from neso.generation import GuidedDecoding

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
