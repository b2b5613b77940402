"""Chat messages to the prompt of a model, by the model's own template."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2

from neso.engine.text.chat_messages import (
    flatten_content,
    plain,
    prepare_messages,
    split_content,
    with_arguments_as_text,
)
from neso.engine.text.template_environment import TemplateRefusal, make_environment
from neso.generation import InvalidParameter

MAX_PROMPT_CHARS = 64 * 1024 * 1024
MAX_SECONDS = 10.0
"""Limits of one rendering. They are looked at between pieces of output, so a loop that prints nothing is only
bounded by the sandbox's limit of 100,000 for `range`."""

_CONTINUE_MARK = "\ue000continue here\ue001 "
"""Private use characters, which are in no template. The space at the end tells whether the template trims."""

_PROBE = "8d1f0a"


class ChatTemplate:
    """The templates of one model. Compiled at first use; safe to share between threads."""

    def __init__(self, sources: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` is jinja2 source, or sources by name ("default", "tool_use", …).

        `special_tokens` are the variables `bos_token`, `eos_token`, … of the templates.
        """
        self._sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, _Compiled] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`.

        `variables` go to the template (`documents`, `enable_thinking`, …), except two: `chat_template` takes
        one of the model's templates by name; `continue_final_message` leaves the last message open, so that
        the model goes on with it. Raises `InvalidParameter` with the field that is at fault.
        """
        extra = plain(dict(variables or {}), "chat_template_kwargs", "it")
        template = self._choose(extra.pop("chat_template", None), tools)
        continue_final = bool(extra.pop("continue_final_message", False))
        fresh = [template.fit(message) for message in prepare_messages(messages)]
        if continue_final:
            if add_generation_prompt:
                raise InvalidParameter("continue_final_message", "cannot go with add_generation_prompt")
            fresh[-1] = _mark_end(fresh[-1])
        arguments = {
            "documents": None,
            **self._special_tokens,
            **extra,
            "messages": fresh,
            "tools": None if tools is None else plain(list(tools), "tools", "it"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            prompt = template.run(arguments)
        except TemplateRefusal as error:
            raise InvalidParameter("messages", str(error)) from None
        except Exception as error:  # a template can fail in any way that an expression can
            raise InvalidParameter(
                "messages", f"the chat template fails on them: {type(error).__name__}: {error}"
            ) from error
        return _cut_at_mark(prompt) if continue_final else prompt

    def _choose(self, name: Any, tools: Any) -> _Compiled:
        if not self._sources:
            raise InvalidParameter(
                "messages", "the model has no chat template; use completions with a prompt instead"
            )
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        if not isinstance(name, str) or name not in self._sources:
            names = ", ".join(sorted(self._sources))
            raise InvalidParameter("chat_template", f"the model has no template {name!r}; it has: {names}")
        if name not in self._compiled:
            self._compiled[name] = _compile(self._sources[name], self._special_tokens)
        return self._compiled[name]


def _compile(source: str, special_tokens: Mapping[str, str]) -> _Compiled:
    try:
        return _Compiled(make_environment().from_string(source), special_tokens)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        where = "" if line is None else f" in line {line}"
        raise InvalidParameter("messages", f"the model's chat template is broken{where}: {error}") from error


@dataclass(frozen=True)
class _Compiled:
    """A compiled template, and what it makes of the two forms of a message's content."""

    template: jinja2.Template
    special_tokens: Mapping[str, str]

    def fit(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its content, and the arguments of its calls, in the form that the template understands."""
        if "tool_calls" in message and self._takes_arguments_as_text:
            message = with_arguments_as_text(message)
        if isinstance(message.get("content"), list):
            return message if self._takes_parts else flatten_content(message)
        # Templates of multimodal models may look at parts only, and print nothing for a string.
        return split_content(message) if self._takes_only_parts else message

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Render within the limits of time and size."""
        deadline = time.monotonic() + MAX_SECONDS
        pieces: list[str] = []
        size = 0
        for piece in self.template.generate(arguments):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_PROMPT_CHARS or time.monotonic() > deadline:
                raise OverflowError(f"it made {size} characters and was stopped")
        return "".join(pieces)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template goes through a list of parts: simply tried.

        A template that does not either fails, or prints the list as Python writes it.
        """
        printed = self._try([{"type": "text", "text": _PROBE}])
        return _PROBE in printed and "'type'" not in printed and '"type"' not in printed

    @cached_property
    def _takes_only_parts(self) -> bool:
        return _PROBE not in self._try(_PROBE) and self._takes_parts

    @cached_property
    def _takes_arguments_as_text(self) -> bool:
        """Whether the template joins the arguments of calls to text, as DeepSeek's do, in place of writing JSON."""
        as_object = self._try_messages(_calls({_PROBE: 1}))
        if f'"{_PROBE}"' in as_object:
            return False
        return f'"{_PROBE}"' in self._try_messages(_calls(f'{{"{_PROBE}": 1}}'))

    def _try(self, content: Any) -> str:
        """What the template makes of one user message; nothing if it fails."""
        return self._try_messages([{"role": "user", "content": content}])

    def _try_messages(self, messages: list[dict[str, Any]]) -> str:
        arguments = {**self.special_tokens, "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return self.run({**arguments, "messages": messages})
        except Exception:
            return ""


def _calls(arguments: Any) -> list[dict[str, Any]]:
    """A chat in which a function is called, as most templates want one."""
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "content": "b", "tool_call_id": "a1b2c3d4e"},
    ]


def _mark_end(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a mark after its text, at which the prompt will be cut."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_MARK}
    if isinstance(content, list) and content:
        last = {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}
        return {**message, "content": [*content[:-1], last]}
    raise InvalidParameter("continue_final_message", "the last message has no content to continue")


def _cut_at_mark(prompt: str) -> str:
    before, mark, after = prompt.rpartition(_CONTINUE_MARK.rstrip())
    if not mark:
        raise InvalidParameter(
            "continue_final_message", "the chat template does not show the last message as it is"
        )
    return before if after.startswith(" ") else before.rstrip()
