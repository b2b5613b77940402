"""The `neso` command. Each subcommand imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import os

# gRPC reads this when it is imported. Engines are started by exec, which its fork handlers would only warn about.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from typing import Annotated

import typer

from neso import __version__
from neso.cli.build import build
from neso.cli.repo import repo
from neso.cli.serve import SUMMARY, ServeCommand, serve_function

app = typer.Typer(
    name="neso",
    help="An inference server for large language models: Triton's protocols, OpenAI's API, its own engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"neso {__version__}")
        raise typer.Exit


@app.callback()
def neso(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """The options of `neso` itself."""


app.command(help="Pack a model for the native runner, quantized if you like.")(build)
app.command("serve", cls=ServeCommand, help=SUMMARY)(serve_function())
app.add_typer(repo, name="repo")


def main() -> None:
    """The entry point of the console script."""
    app()
