"""The `neso` command. Subcommands import the server when they run, so that `--help` is quick."""

from __future__ import annotations

import os

# gRPC reads this on import. Engines are started with exec, and gRPC's fork handlers would print warnings.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from typing import Annotated

import typer

from neso import __version__
from neso.cli.build import build
from neso.cli.chat import chat
from neso.cli.cluster import cluster
from neso.cli.doctor import doctor
from neso.cli.flag_command import command_function
from neso.cli.launch import LAUNCH_HELP, launch
from neso.cli.models import models, pull
from neso.cli.perf import perf
from neso.cli.repo import repo
from neso.cli.serve import SUMMARY, ServeCommand, serve_function
from neso.cli.worker import FLAGS as WORKER_FLAGS
from neso.cli.worker import SUMMARY as WORKER_SUMMARY
from neso.cli.worker import WorkerCommand
from neso.cli.worker import run as run_worker

app = typer.Typer(
    name="neso",
    help="Inference server for large language models: Triton protocols, OpenAI API, own engine.",
    no_args_is_help=True,
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


app.command()(chat)
app.command()(models)
app.command()(pull)
app.command()(doctor)
app.command(help="Pack a model for the native runner, optionally quantized.")(build)
app.command(help=LAUNCH_HELP, context_settings={"ignore_unknown_options": True})(launch)
app.command("serve", cls=ServeCommand, help=SUMMARY)(serve_function())
app.command("worker", cls=WorkerCommand, help=WORKER_SUMMARY)(
    command_function(WORKER_FLAGS, run_worker, "models")
)
app.add_typer(cluster, name="cluster")
app.add_typer(repo, name="repo")
app.add_typer(perf, name="perf")


def main() -> None:
    """Entry point of the console script."""
    app()
