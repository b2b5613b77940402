"""`neso launch`: start `neso serve` on ranks of this host, with the options of TensorRT-LLM's launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

TRITONSERVER = "/opt/tritonserver/bin/tritonserver"
LAUNCH_HELP = (
    "Start neso serve on several ranks of this host, with the options of TensorRT-LLM's launch_triton_server.py. "
    "Further arguments are options of neso serve."
)


def launch(
    serve: Annotated[list[str] | None, typer.Argument(metavar="[OPTION of neso serve]...")] = None,
    world_size: Annotated[int, typer.Option("--world_size", min=1, help="Number of ranks of the model.")] = 1,
    model_repo: Annotated[str | None, typer.Option("--model_repo", help="Model repository.")] = None,
    grpc_port: Annotated[str, typer.Option("--grpc_port", help="Port of gRPC.")] = "8001",
    http_port: Annotated[str, typer.Option("--http_port", help="Port of HTTP.")] = "8000",
    metrics_port: Annotated[str, typer.Option("--metrics_port", help="Port of the metrics.")] = "8002",
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Start even if a server is running on this host.")
    ] = False,
    log: Annotated[
        bool, typer.Option("--log", help="Write a verbose log to the file of --log-file.")
    ] = False,
    log_file: Annotated[str, typer.Option("--log-file", help="Log file of --log.")] = "triton_log.txt",
    tensorrt_llm_model_name: Annotated[
        str,
        typer.Option("--tensorrt_llm_model_name", help="Model that runs on the ranks."),
    ] = "tensorrt_llm",
    multi_model: Annotated[
        bool,
        typer.Option("--multi-model", help="The server starts the ranks of all models of the repository."),
    ] = False,
    disable_spawn_processes: Annotated[
        bool,
        typer.Option(
            "--disable-spawn-processes", help="No effect: with --multi-model the server starts all ranks."
        ),
    ] = False,
    no_mpi: Annotated[bool, typer.Option("--no-mpi", help="Start one process without ranks.")] = False,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Accepted; more ranks than cores are always allowed.")
    ] = False,
    tritonserver: Annotated[
        str, typer.Option("--tritonserver", help="No effect: the server is neso serve.")
    ] = TRITONSERVER,
    multimodal_gpu0_cuda_mem_pool_bytes: Annotated[
        int,
        typer.Option(
            "--multimodal_gpu0_cuda_mem_pool_bytes", help="No effect: the server has no memory pools."
        ),
    ] = 0,
    background: Annotated[
        bool, typer.Option("--background", help="Return when the processes are started.")
    ] = False,
) -> None:
    """Run the command; see `LAUNCH_HELP`."""
    del oversubscribe  # always allowed
    if disable_spawn_processes:
        _warn("--disable-spawn-processes has no effect: with --multi-model the server starts all ranks")
    if multimodal_gpu0_cuda_mem_pool_bytes:
        _warn("--multimodal_gpu0_cuda_mem_pool_bytes has no effect: the server has no memory pools")
    if multi_model and disable_spawn_processes:
        world_size = 1
    elif multi_model and world_size > 1:
        raise _wrong("--world_size must be 1 with --multi-model: the server starts the ranks of all models")
    if no_mpi and world_size > 1:
        raise _wrong("--world_size must be 1 with --no-mpi")
    if world_size > 1 and "," in tensorrt_llm_model_name:
        raise _wrong("--tensorrt_llm_model_name: one model runs on the ranks; use --multi-model for several")
    if tritonserver != TRITONSERVER:
        _warn("--tritonserver has no effect: the server is neso serve")
    if running := running_servers():
        pids = " ".join(map(str, running))
        message = f"neso serve is already running, PID {pids}. Use `kill {pids}` to stop it."
        if not force:
            raise _wrong(f"{message} Or use --force.")
        _warn(message)
    arguments = [f"--http-port={http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}"]
    if model_repo is not None:
        arguments.append(f"--model-repository={model_repo}")
    if log:
        arguments += ["--log-verbose=3", f"--log-file={log_file}"]
    if multi_model:
        arguments.append("--multi-model")
    if world_size > 1:
        arguments.append(f"--rank-model={tensorrt_llm_model_name}")
    run(world_size, [*arguments, *(serve or ())], background=background)


def run(world_size: int, arguments: Sequence[str], *, background: bool) -> None:
    """Start `neso serve` on this number of ranks. Without `background` it replaces this process."""
    command = [sys.executable, "-m", "neso.cli", "serve", *arguments]
    if world_size > 1:
        from neso.engine.errors import EngineError
        from neso.engine.parallel.launcher import mpiexec_command

        try:
            command = [*mpiexec_command(world_size, cleanup=True), *command]
        except EngineError as error:
            raise _wrong(str(error)) from None
    sys.stdout.flush()
    if background:
        subprocess.Popen(command, stdin=subprocess.DEVNULL)
    else:
        os.execvp(command[0], command)


def running_servers(proc: Path = Path("/proc")) -> list[int]:
    """Return the process ids of `neso serve` on this host, as far as this user can see them."""
    found = []
    for directory in proc.iterdir():
        if not directory.name.isdecimal():
            continue
        try:
            words = (directory / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if any(_is_neso(words, index) for index in range(1, len(words) - 1)):
            found.append(int(directory.name))
    return sorted(found)


def _is_neso(words: list[bytes], index: int) -> bool:
    """Whether `words[index]` is `serve`, the command of neso, run by Python."""
    name, python = words[index - 1].rpartition(b"/")[2], words[0].rpartition(b"/")[2]
    return (
        words[index] == b"serve"
        and name in (b"neso", b"neso.cli")
        and python.startswith((b"python", b"neso"))
    )


def _warn(message: str) -> None:
    print(f"neso launch: {message}", file=sys.stderr)


def _wrong(message: str) -> typer.Exit:
    _warn(message)
    return typer.Exit(2)
