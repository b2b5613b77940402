"""The jinja2 environment that chat templates are written for."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_REPEAT = 1_000_000
"""Longest string or list, in items, that a template may make by multiplication."""


class TemplateRefusal(jinja2.TemplateError):
    """The template called `raise_exception`: it does not want these messages."""


def make_environment() -> ChatTemplateEnvironment:
    """An environment with the filters, tags and globals of `transformers`' `apply_chat_template`."""
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
    """A sandbox that also refuses `"x" * 10**9` and `9 ** 10**9`; jinja2's own limits `range` to 100,000."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`. Raises `OverflowError` if the result would be too big."""
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
    """`{% generation %}`, which marks the assistant's words for training; here they are just rendered."""

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
    raise TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own `tojson` escapes HTML, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _TemplateDict:
    """`dict(…)` in templates, without the type `dict` itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """`namespace(…)` in templates, without names that reach into Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that a template can have namespace(self=…), as with jinja2's own
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
