"""`neso serve`: the command, generated from the flags that the options declare."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping
from textwrap import wrap
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from neso.cli.serve_flags import FLAGS, TOPICS
from neso.flags import Flag

SUMMARY = "Serve models over HTTP, gRPC and the OpenAI API."
_MODELS = (
    "Checkpoint in Hugging Face's format: a directory, an org/name on the hub, or NAME=CHECKPOINT to set the served "
    "name. Default without any MODEL or model repository: the small model that is part of the package."
)
_RESTRICTED_API = "--openai-restricted-api"
_INDENT = " " * 8


class ServeCommand(TyperCommand):
    """A command that prints its own help; typer's help truncates long names in narrow terminals."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, join_restricted_api(args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text(TOPICS))


def serve_function() -> Callable[..., None]:
    """Create a function with a parameter for each flag, from which typer creates the command.

    For typer, each flag is a list of texts. `FlagValues` parses them like the texts of a configuration file, and
    reports a flag that is given twice.
    """

    def serve(**given: Any) -> None:
        from neso.cli.server_process import run

        names = (*(flag.name for flag in FLAGS), "models")
        raise typer.Exit(run({name: _texts(given[_parameter(name)]) for name in names}))

    annotations: dict[str, Any] = {
        "models": Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...")]
    }
    annotations |= {_parameter(flag.name): _annotation(flag) for flag in FLAGS}
    serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in annotations.items()
        ]
    )
    serve.__annotations__ = annotations
    return serve


def _annotation(flag: Flag) -> Any:
    kind: Any = bool | None if flag.kind.bare else list[str] | None
    return Annotated[kind, typer.Option(*flag.options)]


def _texts(given: list[str] | bool | None) -> list[str]:
    return ["true"] if given is True else list(given or ())


def _parameter(name: str) -> str:
    """Return the Python name of a flag."""
    return name.replace("-", "_")


def join_restricted_api(arguments: list[str]) -> list[str]:
    """Join the three arguments `GROUPS KEY VALUE` of Triton's OpenAI frontend into one."""
    result: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == _RESTRICTED_API and len(rest) >= 3 and "=" not in rest[0]:
            groups, key, value, rest = rest[0], rest[1], rest[2], rest[3:]
            argument = f"{_RESTRICTED_API}={groups}:{key}={value}"
        result.append(argument)
    return result


def help_text(topics: Mapping[str, tuple[Flag, ...]]) -> str:
    """Return the usage, the MODEL argument, and the flags by topic."""
    width = min(shutil.get_terminal_size().columns, 110)
    lines = ["Usage: neso serve [OPTIONS] [MODEL]...", "", SUMMARY, ""]
    lines += [_rule("MODEL", width), *_indented(_MODELS, width)]
    for title, flags in topics.items():
        lines += ["", _rule(title, width)]
        for flag in flags:
            lines += _entry(flag, width)
    return "\n".join(lines) + "\n"


def _rule(title: str, width: int) -> str:
    return f"─ {title} ".ljust(width, "─")


def _entry(flag: Flag, width: int) -> Iterator[str]:
    yield f"  {', '.join(flag.options)} {flag.value_name}".rstrip()
    yield from _indented(flag.description, width)


def _indented(text: str, width: int) -> list[str]:
    return wrap(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)
