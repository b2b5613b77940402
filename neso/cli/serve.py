"""`neso serve`: the command, made of the table of its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from neso.cli.options import OPTIONS, TOPICS
from neso.cli.options.access import joined
from neso.cli.options.help import help_text
from neso.cli.options.option import Option

SUMMARY = "Serve models over HTTP, gRPC and OpenAI's API."
_MODELS = (
    "Checkpoints in Hugging Face's layout: a directory, an org/name on the hub, or NAME=either to choose the name. "
    "Without any MODEL or repository: the small model that ships inside."
)


class ServeCommand(TyperCommand):
    """A command with the help of the table."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, joined(args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text(SUMMARY, _MODELS, TOPICS))


def serve_function() -> Callable[..., None]:
    """What typer makes the command of: a function whose parameters are the options.

    Each option is a list of texts to typer, so that one which is given twice can be told from one that is not, and
    the texts of a configuration file mean what those of the command line do.
    """

    def serve(**given: Any) -> None:
        from neso.cli.serving import run

        names = (*(option.name for option in OPTIONS), "models")
        raise typer.Exit(run({name: _texts(given[_parameter(name)]) for name in names}))

    annotations: dict[str, Any] = {
        "models": Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...")]
    }
    annotations |= {_parameter(option.name): _annotation(option) for option in OPTIONS}
    serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in annotations.items()
        ]
    )
    serve.__annotations__ = annotations
    return serve


def _annotation(option: Option) -> Any:
    kind: Any = bool | None if option.kind.bare else list[str] | None
    return Annotated[kind, typer.Option(*option.flags)]


def _texts(given: list[str] | bool | None) -> list[str]:
    return ["true"] if given is True else list(given or ())


def _parameter(name: str) -> str:
    """The name of an option in Python."""
    return name.replace("-", "_")
