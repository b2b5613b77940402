"""`neso build`: pack a model for the native runner, or quantize it to float8 for GPUs."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class BuildDType(str, Enum):
    auto = "auto"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class BuildQuantization(str, Enum):
    int8 = "int8"
    int4 = "int4"
    int8_dynamic = "int8_dynamic"
    fp8 = "fp8"


def build(
    model: Annotated[str, typer.Argument(help="Checkpoint directory, GGUF file, or Hugging Face id.")],
    target: Annotated[Path, typer.Argument(help="Engine directory to write.")],
    dtype: Annotated[
        BuildDType, typer.Option(help="Type of weights that are not quantized.")
    ] = BuildDType.auto,
    quantization: Annotated[
        BuildQuantization | None,
        typer.Option(help="int8, int4: weights only; int8_dynamic: weights and activations; fp8: for GPUs."),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", "--tp", help="Number of ranks that each layer is split among.")
    ] = 1,
    pipeline_parallel: Annotated[
        int,
        typer.Option(
            "--pipeline-parallel",
            "--pp",
            help="Number of groups of ranks that the layers are distributed to.",
        ),
    ] = 1,
    rank: Annotated[
        int | None, typer.Option(help="Write only the files of this rank. Default: of all ranks.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Number of threads. Default: all cores.")] = None,
) -> None:
    """Pack a model, so that later starts map it into memory without conversion."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from neso.engine.load.build import build_engine, build_float8
    from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
    from neso.engine.specs.config_reader import UnsupportedModel
    from neso.engine.weights.hub import ModelNotFound, resolve_model
    from neso.engine.weights.source import CheckpointError

    options = RunnerOptions(dtype.value, quantization.value if quantization else None, threads)
    started = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    try:
        with Progress(*columns, TimeElapsedColumn()) as bar:
            task = bar.add_task("packing")

            def progress(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            if quantization is BuildQuantization.fp8:
                if (tensor_parallel, pipeline_parallel, rank) != (1, 1, None):
                    raise UnsupportedOption(
                        "fp8 checkpoints are not built for ranks: each rank reads its part of the whole checkpoint"
                    )
                if dtype is not BuildDType.auto:
                    raise UnsupportedOption("fp8 cannot be combined with --dtype")
                build_float8(resolve_model(model), target, progress)
            else:
                build_engine(
                    resolve_model(model), target, options, tensor_parallel, pipeline_parallel, rank, progress
                )
    except (CheckpointError, ModelNotFound, UnsupportedModel, ValueError, OSError) as error:
        typer.echo(f"neso build: {error}", err=True)
        raise typer.Exit(1) from None
    size = sum(path.stat().st_size for path in target.iterdir())
    typer.echo(f"{target}: {size / 1e6:.0f} MB in {time.perf_counter() - started:.1f} s")
