"""Chat templates: render chat messages as the prompt of a model."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from neso.engine.text.chat_messages import (
    flatten_content,
    plain,
    prepare_messages,
    split_content,
    with_arguments_as_text,
)
from neso.generation import InvalidParameter

MAX_PROMPT_CHARS = 64 * 1024 * 1024
MAX_SECONDS = 10.0
"""Limits of one rendering: characters of the prompt and seconds. They are checked after each piece of output; a loop
without output is only limited by the sandbox's limit of 100,000 for `range`.
"""

_CONTINUE_MARK = "\ue000continue here\ue001 "
"""Private use characters, which no template contains. The space at the end shows whether the template trims."""

_PROBE = "8d1f0a"


class ChatTemplate:
    """Chat templates of one model, compiled at first use. Thread-safe."""

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
        """Render the prompt for `messages`.

        `variables` are passed to the template (`documents`, `enable_thinking`, …), except two: `chat_template` selects
        one of the model's templates by name; `continue_final_message` leaves the last message open, so that the model
        continues it. Raises `InvalidParameter` with the name of the invalid field.
        """
        extra = plain(dict(variables or {}), "chat_template_kwargs", "it")
        template = self._choose(extra.pop("chat_template", None), tools)
        continue_final = bool(extra.pop("continue_final_message", False))
        prepared = [template.adapt(message) for message in prepare_messages(messages)]
        if continue_final:
            if add_generation_prompt:
                raise InvalidParameter("continue_final_message", "cannot go with add_generation_prompt")
            prepared[-1] = _mark_end(prepared[-1])
        arguments = {
            "documents": None,
            **self._special_tokens,
            **extra,
            "messages": prepared,
            "tools": None if tools is None else plain(list(tools), "tools", "it"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            prompt = template.run(arguments)
        except TemplateRejection as error:
            raise InvalidParameter("messages", str(error)) from None
        except Exception as error:  # expressions in a template can raise anything
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
    """A compiled template and the message format that it expects, detected by rendering probes."""

    template: jinja2.Template
    special_tokens: Mapping[str, str]

    def adapt(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with its content and tool-call arguments in the form that the template supports."""
        if "tool_calls" in message and self._takes_arguments_as_text:
            message = with_arguments_as_text(message)
        if isinstance(message.get("content"), list):
            return message if self._takes_parts else flatten_content(message)
        # Some templates of multimodal models print nothing for string content.
        return split_content(message) if self._takes_only_parts else message

    def run(self, arguments: Mapping[str, Any]) -> str:
        """Render within the time and size limits. Raises `OverflowError`."""
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
        """Whether the template iterates over content parts. Other templates fail or print the repr of the list."""
        printed = self._try([{"type": "text", "text": _PROBE}])
        return _PROBE in printed and "'type'" not in printed and '"type"' not in printed

    @cached_property
    def _takes_only_parts(self) -> bool:
        return _PROBE not in self._try(_PROBE) and self._takes_parts

    @cached_property
    def _takes_arguments_as_text(self) -> bool:
        """Whether the template concatenates tool call arguments as a string (DeepSeek), instead of `tojson`."""
        as_object = self._try_messages(_calls({_PROBE: 1}))
        if f'"{_PROBE}"' in as_object:
            return False
        return f'"{_PROBE}"' in self._try_messages(_calls(f'{{"{_PROBE}": 1}}'))

    def _try(self, content: Any) -> str:
        """Render one user message; "" if the template fails."""
        return self._try_messages([{"role": "user", "content": content}])

    def _try_messages(self, messages: list[dict[str, Any]]) -> str:
        arguments = {**self.special_tokens, "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return self.run({**arguments, "messages": messages})
        except Exception:
            return ""


def _calls(arguments: Any) -> list[dict[str, Any]]:
    """Return a chat with a function call, in the order of roles that most templates require."""
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "content": "b", "tool_call_id": "a1b2c3d4e"},
    ]


def _mark_end(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with a mark after its text, at which the prompt is cut."""
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


MAX_REPEAT = 1_000_000
"""Maximum length of a string or list created by multiplication in a template."""


class TemplateRejection(jinja2.TemplateError):
    """The template rejected the messages with `raise_exception`."""


def make_environment() -> ChatTemplateEnvironment:
    """Create an environment with the filters, tags and globals of `transformers`' `apply_chat_template`."""
    environment = ChatTemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_TemplateDict(),
        namespace=_TemplateNamespace,
    )
    return environment


class ChatTemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that also rejects `"x" * 10**9` and `9 ** 10**9`; jinja2 limits `range` to 100,000."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`. Raises `OverflowError` if the result is too large."""
        if operator == "**" and not (abs(left) <= 2**64 and abs(right) <= 64):
            raise OverflowError(f"{left} ** {right} is too big")
        if operator == "*":
            _check_repeat(left, right)
            _check_repeat(right, left)
        return super().call_binop(context, operator, left, right)


def _check_repeat(items: Any, times: Any) -> None:
    if isinstance(items, (str, list, tuple)) and isinstance(times, int) and len(items) * times > MAX_REPEAT:
        raise OverflowError(f"{len(items)} items {times} times is too much")


class GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's text for training; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = CallBlock(self.call_method("_render"), [], [], body)
        block.set_lineno(line)
        return block

    def _render(self, caller: Any) -> str:
        return str(caller())


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRejection(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Implement `tojson` without jinja2's HTML escaping, on which models are not trained."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _TemplateDict:
    """`dict(…)` in templates, without access to the type `dict`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """`namespace(…)` in templates, without names that access Python internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # allows namespace(self=…), like jinja2's own
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace in a chat template cannot hold {name!r}")
