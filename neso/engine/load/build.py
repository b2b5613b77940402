"""Implementation of `neso build`: conversion of a checkpoint to an engine directory or an fp8 checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from neso import __version__
from neso.engine.parallel.layout import RankLayout
from neso.engine.parallel.sharding import open_tensors, shard_of
from neso.engine.runners.native.packed_decoder import Item, count_items, dense_dtype, pack_items, write_rank
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
from neso.engine.specs.decoder_spec import DecoderSpec, TensorPart, TensorProduct, all_tensors
from neso.engine.specs.registry import decoder_spec
from neso.engine.text.tokenizer import Tokenizer
from neso.engine.thread_placement import place_threads
from neso.engine.weights.checkpoint import SINGLE_FILE, open_source
from neso.engine.weights.engine_directory import (
    BUILD_FIELD,
    CONFIG_FILE,
    FORMAT,
    BuildInfo,
    EngineDirectory,
    packed_file,
    read_build_info,
)
from neso.engine.weights.model_tensors import DecoderTensors
from neso.engine.weights.quantized import Float8Matrix, dense
from neso.engine.weights.safetensors_file import SafetensorsWriter
from neso.engine.weights.source import TensorSource

Progress = Callable[[int, int], None]

_COPIED = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "chat_template*")


def build_engine(
    model: Path,
    target: Path,
    options: RunnerOptions,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    rank: int | None = None,
    progress: Progress = lambda done, total: None,
) -> BuildInfo:
    """Convert a checkpoint directory or a GGUF file to an engine directory; `target` must be empty or not exist.

    With a `rank`, only its files are written, and `target` may have those of other ranks of the same build. `progress`
    is called with the number of finished tensors of all ranks and their total. Raises `CheckpointError`,
    `UnsupportedModel`, `UnsupportedOption`; `FileExistsError` when the target is not empty.
    """
    if options.quantization == "fp8":
        raise UnsupportedOption(
            "fp8 weights are for GPUs, engine directories for CPUs; build_float8 makes them"
        )
    layouts = _layouts(tensor_parallel, pipeline_parallel, rank)
    threads = place_threads(options.num_threads, "none")  # the weights are only written to files
    with open_source(model) as source:
        if isinstance(source, EngineDirectory):
            raise UnsupportedOption(f"{model} is an engine directory already")
        spec = decoder_spec(source.config)
        shards = [shard_of(spec, layout) for layout in layouts]
        dtype = str(dense_dtype(DecoderTensors(spec, source), options))
        info = BuildInfo(
            format=FORMAT,
            neso_version=__version__,
            source=model.name,
            dtype=dtype,
            quantization=options.quantization,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
        )
        if rank is None:
            prepare_target(target)
        else:
            _prepare_rank(target, rank, info)
        done, total = 0, sum(count_items(shard.spec) for shard in shards)
        for shard in shards:
            items = pack_items(open_tensors(shard, source), options, threads)
            write_rank(target, shard.layout, shard.spec, _counted(items, done, total, progress))
            done += count_items(shard.spec)
        # Written last: it marks the directory as complete.
        config = {**source.config, BUILD_FIELD: msgspec.to_builtins(info)}
        # Replaced in one operation, because the builds of other ranks may read it.
        written = target / f"{CONFIG_FILE}.{layouts[0].rank}"
        written.write_text(json.dumps(config, indent=1))
        written.replace(target / CONFIG_FILE)
    copy_text_files(model, target)
    return info


def _layouts(tensor_parallel: int, pipeline_parallel: int, rank: int | None) -> list[RankLayout]:
    """Return the ranks to build. Raises `UnsupportedOption`."""
    try:
        first = RankLayout(rank or 0, tensor_parallel, pipeline_parallel)
    except ValueError as error:
        raise UnsupportedOption(str(error)) from None
    if rank is not None:
        return [first]
    return [RankLayout(index, tensor_parallel, pipeline_parallel) for index in range(first.size)]


def _counted(
    items: Iterator[tuple[str, Item]], done: int, total: int, progress: Progress
) -> Iterator[tuple[str, Item]]:
    """Report each item to `progress`; `done` items were finished before."""
    for count, item in enumerate(items, done + 1):
        yield item
        progress(count, total)


def prepare_target(target: Path) -> None:
    """Create the directory. Raises `FileExistsError` if it is not empty."""
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty")
    target.mkdir(parents=True, exist_ok=True)


def _prepare_rank(target: Path, rank: int, info: BuildInfo) -> None:
    """Create the directory for one rank. Raises `FileExistsError` unless it only has other ranks of the same build."""
    target.mkdir(parents=True, exist_ok=True)
    if (target / packed_file(rank)).exists():
        raise FileExistsError(f"{target} already has the files of rank {rank}")
    if (target / CONFIG_FILE).exists() and read_build_info(target) != info:
        raise FileExistsError(f"{target} has another model, or an engine with other options")


def copy_text_files(model: Path, target: Path) -> None:
    """Copy the tokenizer files and the chat template."""
    if model.is_file():
        Tokenizer.from_gguf(model).save(target)
        return
    for pattern in _COPIED:
        for path in model.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)


_E4M3_MAX = np.float32(448)
_ENTRY_BYTES = 192
_QUANTIZATION = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}

Tensors = Iterator[tuple[str, npt.NDArray[Any]]]


def build_float8(model: Path, target: Path, progress: Progress = lambda done, total: None) -> None:
    """Write an fp8 checkpoint for GPUs; `target` must be empty or not exist.

    The result is a Hugging Face checkpoint in FBGEMM's format with a scale per output, which other servers can read
    too. The embedding and the LM head are not quantized, because the loss of accuracy would outweigh the saved memory.
    `progress` is called with the number of finished tensors and their total. Raises `CheckpointError`,
    `UnsupportedModel`, `UnsupportedOption`; `FileExistsError` when the target is not empty.
    """
    with open_source(model) as source:
        if isinstance(source, EngineDirectory):
            raise UnsupportedOption(f"{model} is an engine directory already")
        spec = decoder_spec(source.config)
        names = _stored_tensors(spec)
        prepare_target(target)
        with SafetensorsWriter(target / SINGLE_FILE, _ENTRY_BYTES * 2 * len(names)) as writer:
            for done, (name, shape, rounded) in enumerate(names, 1):
                for written, array in _tensors(source, name, shape, rounded):
                    writer.add(written, array)
                progress(done, len(names))
        config = {**source.config, "quantization_config": _QUANTIZATION}
        (target / CONFIG_FILE).write_text(json.dumps(config, indent=1))
    copy_text_files(model, target)


def round_to_float8(weights: npt.NDArray[np.float32]) -> Float8Matrix:
    """Round float32[N, K] with one scale per output; the largest weight of each output becomes 448."""
    scales = np.maximum(np.abs(weights).max(axis=1, keepdims=True) / _E4M3_MAX, np.float32(1e-12))
    codes = (weights / scales).astype(ml_dtypes.float8_e4m3fn)
    return Float8Matrix(codes, scales, (1, weights.shape[1]))


def _stored_tensors(spec: DecoderSpec) -> list[tuple[str, tuple[int, ...], bool]]:
    """Return the name and shape of each tensor, and whether it is rounded: matrices of layers, except routers."""
    tensors: dict[str, tuple[tuple[int, ...], bool]] = {}
    for role, layer, expert, shape in all_tensors(spec):
        place = spec.tensor_names[role]
        if isinstance(place, TensorProduct):
            raise UnsupportedOption(
                f"the family {spec.family} stores the {role} as a product of two matrices; fp8 does not"
            )
        if isinstance(place, TensorPart):
            if place.transposed:
                raise UnsupportedOption(
                    f"the family {spec.family} stores matrices [inputs, outputs]; fp8 does not"
                )
            shape = (place.outputs, *shape[1:])
        rounded = layer is not None and len(shape) == 2 and not role.endswith("router")
        tensors[spec.tensor_name(role, layer, expert)] = shape, rounded
    return [(name, shape, rounded) for name, (shape, rounded) in tensors.items()]


def _tensors(source: TensorSource, name: str, shape: tuple[int, ...], rounded: bool) -> Tensors:
    """Yield the tensors that are written for a weight: the weight itself, or codes and scales."""
    if len(shape) == 1:
        vector = np.empty(shape, np.float32)
        source.read_float32(name, vector)
        yield name, vector.astype(ml_dtypes.bfloat16)
        return
    found = source.matrix(name, (shape[0], shape[1]))
    if not rounded:
        yield name, dense(found).astype(ml_dtypes.bfloat16)
        return
    if isinstance(found, Float8Matrix) and found.output_scales() is not None:
        matrix = found
    else:
        matrix = round_to_float8(dense(found).astype(np.float32))
    scales = matrix.output_scales()
    assert scales is not None
    yield name, matrix.codes
    yield name.removesuffix(".weight") + ".weight_scale", scales[:, None]
