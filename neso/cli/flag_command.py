"""Commands whose parameters are flags that options declare."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from textwrap import wrap
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from neso.flags import Flag

_INDENT = " " * 8


class FlagCommand(TyperCommand):
    """A command that prints its own help; typer's help truncates long names in narrow terminals."""

    help_of: Callable[[], str]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(type(self).help_of())


def command_function(
    flags: Iterable[Flag], run: Callable[[dict[str, list[str]]], int], argument: str = ""
) -> Callable[..., None]:
    """Create a function with a parameter for each flag, from which typer creates the command.

    For typer, each flag is a list of texts. `FlagValues` parses them like the texts of a configuration file, and
    reports a flag that is given twice. `run` gets the texts by flag name, and those of the positional argument, if the
    command has one, by the name `argument`; it returns the exit status.
    """
    names = [flag.name for flag in flags] + ([argument] if argument else [])

    def command(**given: Any) -> None:
        raise typer.Exit(run({name: _texts(given[_parameter(name)]) for name in names}))

    annotations: dict[str, Any] = {}
    if argument:
        metavar = f"[{argument.removesuffix('s').upper()}]..."
        annotations[_parameter(argument)] = Annotated[list[str] | None, typer.Argument(metavar=metavar)]
    annotations |= {_parameter(flag.name): _annotation(flag) for flag in flags}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in annotations.items()
        ]
    )
    command.__annotations__ = annotations
    return command


def _annotation(flag: Flag) -> Any:
    kind: Any = bool | None if flag.kind.bare else list[str] | None
    return Annotated[kind, typer.Option(*flag.options)]


def _texts(given: list[str] | bool | None) -> list[str]:
    return ["true"] if given is True else list(given or ())


def _parameter(name: str) -> str:
    """Return the Python name of a flag; with a prefix, as `async` is a keyword."""
    return "flag_" + name.replace("-", "_")


def help_text(usage: str, summary: str, topics: Mapping[str, tuple[Flag, ...] | str]) -> str:
    """Return the usage, the summary, and for each topic its flags or its text."""
    width = min(shutil.get_terminal_size().columns, 110)
    lines = [f"Usage: {usage}", "", *wrap(summary, width)]
    for title, content in topics.items():
        lines += ["", f"─ {title} ".ljust(width, "─")]
        if isinstance(content, str):
            lines += _indented(content, width)
            continue
        for flag in content:
            lines += _entry(flag, width)
    return "\n".join(lines) + "\n"


def _entry(flag: Flag, width: int) -> Iterator[str]:
    yield f"  {', '.join(flag.options)} {flag.value_name}".rstrip()
    yield from _indented(flag.description, width)


def _indented(text: str, width: int) -> list[str]:
    return wrap(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)
