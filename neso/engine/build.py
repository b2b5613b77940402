"""`neso build`: a checkpoint becomes an engine directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from neso import __version__
from neso.engine.runners.base import RunnerOptions, UnsupportedOption
from neso.engine.runners.native.packed_decoder import Item, count_items, dense_dtype, pack_items, write_rank
from neso.engine.runners.native.runner import available_cores
from neso.engine.runners.native.tensor_parallel import ShardedTensors, shard_spec
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.registry import decoder_spec
from neso.engine.text.tokenizer import Tokenizer
from neso.engine.weights.checkpoint import open_source
from neso.engine.weights.engine_directory import BUILD_FIELD, CONFIG_FILE, FORMAT, BuildInfo, EngineDirectory
from neso.engine.weights.model_tensors import DecoderTensors

Progress = Callable[[int, int], None]

_COPIED = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "chat_template*")


def build_engine(
    model: Path,
    target: Path,
    options: RunnerOptions,
    tensor_parallel: int = 1,
    progress: Progress = lambda done, total: None,
) -> BuildInfo:
    """Pack a checkpoint directory or a GGUF file into `target`, which must be empty or not exist.

    `progress` is called with the matrices and vectors done, and their number. Raises `CheckpointError`,
    `UnsupportedModel`, `UnsupportedOption`; `FileExistsError` when the target is not empty.
    """
    if options.quantization == "fp8":
        raise UnsupportedOption(
            "fp8 weights are for GPUs, engine directories for CPUs; build_float8 makes them"
        )
    if tensor_parallel < 1:
        raise UnsupportedOption(f"tensor_parallel must be at least 1, got {tensor_parallel}")
    threads = options.num_threads or available_cores()
    with open_source(model) as source:
        if isinstance(source, EngineDirectory):
            raise UnsupportedOption(f"{model} is an engine directory already")
        spec = decoder_spec(source.config)
        rank_spec = shard_spec(spec, tensor_parallel)
        dtype = str(dense_dtype(DecoderTensors(spec, source), options))
        prepare_target(target)
        matrices = {}
        for rank in range(tensor_parallel):
            whole = DecoderTensors(spec, source)
            tensors = ShardedTensors(spec, source, rank, tensor_parallel) if tensor_parallel > 1 else whole
            items = pack_items(tensors, options, threads)
            matrices = write_rank(target, rank, rank_spec, _counted(items, spec, progress))
        info = BuildInfo(
            format=FORMAT,
            neso_version=__version__,
            source=model.name,
            dtype=dtype,
            quantization=options.quantization,
            tensor_parallel=tensor_parallel,
            matrices=matrices,
        )
        # Last: a directory without it is no engine.
        config = {**source.config, BUILD_FIELD: msgspec.to_builtins(info)}
        (target / CONFIG_FILE).write_text(json.dumps(config, indent=1))
    copy_text_files(model, target)
    return info


def _counted(
    items: Iterator[tuple[str, Item]], spec: DecoderSpec, progress: Progress
) -> Iterator[tuple[str, Item]]:
    total = count_items(spec)
    for done, item in enumerate(items, 1):
        yield item
        progress(done, total)


def prepare_target(target: Path) -> None:
    """Make the directory. Raises `FileExistsError` when there is something in it."""
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty")
    target.mkdir(parents=True, exist_ok=True)


def copy_text_files(model: Path, target: Path) -> None:
    """What the tokenizer and the chat template are made of."""
    if model.is_file():
        Tokenizer.from_gguf(model).save(target)
        return
    for pattern in _COPIED:
        for path in model.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
