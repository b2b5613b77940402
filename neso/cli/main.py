"""The `neso` command. Subcommands import the server when they run, so that `--help` is quick."""

from __future__ import annotations

import os

# gRPC reads this on import. Engines are started with exec, and gRPC's fork handlers would print warnings.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from typing import Annotated

import typer

from neso import __version__
from neso.cli.build import build
from neso.cli.launch import LAUNCH_HELP, launch
from neso.cli.perf import perf
from neso.cli.repo import repo
from neso.cli.serve import SUMMARY, ServeCommand, serve_function

app = typer.Typer(
    name="neso",
    help="Inference server for large language models: Triton protocols, OpenAI API, own engine.",
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
    """Options of `neso` itself."""


app.command(help="Pack a model for the native runner, optionally quantized.")(build)
app.command(help=LAUNCH_HELP, context_settings={"ignore_unknown_options": True})(launch)
app.command("serve", cls=ServeCommand, help=SUMMARY)(serve_function())
app.add_typer(repo, name="repo")
app.add_typer(perf, name="perf")


def main() -> None:
    """Entry point of the console script."""
    app()
