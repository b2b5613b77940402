"""Hugging Face checkpoint directories, and opening a model's weights by path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.parallel.layout import SINGLE_RANK, RankLayout
from neso.engine.weights.engine_directory import EngineDirectory, is_engine_directory
from neso.engine.weights.files import read_json_object
from neso.engine.weights.gguf.checkpoint import GGUFCheckpoint
from neso.engine.weights.quantized import Matrix
from neso.engine.weights.quantized_checkpoints import checkpoint_format
from neso.engine.weights.safetensors_file import SafetensorsFile
from neso.engine.weights.source import CheckpointError, TensorSource, copy_as_float32, is_float

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def open_source(path: Path | str, layout: RankLayout = SINGLE_RANK) -> TensorSource:
    """Open a Hugging Face checkpoint directory, a GGUF file, or an engine directory written by `neso build`.

    `layout`: the rank whose files of an engine directory are opened. The others hold the whole model.

    Raises `CheckpointError` for missing or invalid files.
    """
    path = Path(path)
    if path.is_file():
        return GGUFCheckpoint(path)
    return EngineDirectory(path, layout) if is_engine_directory(path) else Checkpoint(path)


class Checkpoint(TensorSource):
    """A directory with config.json, generation_config.json and memory-mapped safetensors files.

    - config: content of config.json
    - generation_config: content of generation_config.json, empty if there is none

    Raises `CheckpointError` on opening for missing or invalid files.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory}: there is no such directory")
        self.config = read_json_object(self.directory / "config.json")
        if "quantization_config" not in self.config and (found := self._separate_quantization()):
            self.config["quantization_config"] = found
        generation = self.directory / "generation_config.json"
        self.generation_config = read_json_object(generation) if generation.exists() else {}
        self._format = checkpoint_format(self.config, str(self.directory / "config.json"))
        self._files = self._open_files()

    def _separate_quantization(self) -> dict[str, Any]:
        """Return `quantization_config` from the file of its own that AutoGPTQ and AutoAWQ used to write; {} without."""
        gptq, awq = self.directory / "quantize_config.json", self.directory / "quant_config.json"
        if gptq.exists():
            return {"quant_method": "gptq", **read_json_object(gptq)}
        if awq.exists():
            values = read_json_object(awq)
            names = {"w_bit": "bits", "q_group_size": "group_size"}
            return {"quant_method": "awq", **{names.get(name, name): value for name, value in values.items()}}
        return {}

    def names(self) -> Iterator[str]:
        """Return the names of all stored tensors."""
        return iter(self._files)

    def __contains__(self, name: str) -> bool:
        return self.has_stored(name) or self._is_quantized(name)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        if self._is_quantized(name):
            raise CheckpointError(f"{self.directory}: tensor {name!r} is quantized, but must be dense")
        return self.stored_tensor(name, shape)

    def has_stored(self, name: str) -> bool:
        """Whether the files have a tensor with this name: weights, codes or scales."""
        return name in self._files

    def stored_tensor(self, name: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """Like `tensor`, but also returns codes and scales of quantized weights."""
        if name not in self._files:
            raise CheckpointError(f"{self.directory}: the checkpoint has no tensor {name!r}")
        file = self._files[name]
        found = file.entry(name).shape
        if shape is not None and found != shape:
            raise CheckpointError(
                f"{file.path}: tensor {name!r} has the shape {list(found)}, but the model needs {list(shape)}"
            )
        return file.tensor(name)

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        if self._format is not None and self._format.is_quantized(self, name):
            return self._format.read(self, name, shape)
        found = self.tensor(name, shape)
        self._check_float(name, found.dtype)
        return found

    def read_float32(self, name: str, target: npt.NDArray[np.float32]) -> None:
        if target.ndim == 2 and self._format is not None and self._format.is_quantized(self, name):
            outputs, inputs = target.shape
            target[...] = self._format.read(self, name, (outputs, inputs)).dequantize()
            return
        source = self.tensor(name, target.shape)
        self._check_float(name, source.dtype)
        copy_as_float32(source, target)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _is_quantized(self, name: str) -> bool:
        return self._format is not None and self._format.is_quantized(self, name)

    def _check_float(self, name: str, dtype: np.dtype[Any]) -> None:
        if not is_float(dtype):
            raise CheckpointError(
                f"{self._files[name].path}: tensor {name!r} has the type {dtype}; "
                "only float32, float16, bfloat16 and float64 weights are supported"
            )

    def _open_files(self) -> dict[str, SafetensorsFile]:
        """Map tensor names to their files."""
        if (self.directory / INDEX_FILE).exists():
            return self._open_shards()
        path = self.directory / SINGLE_FILE
        if not path.exists():
            raise CheckpointError(
                f"{self.directory}: there is neither {SINGLE_FILE} nor {INDEX_FILE}; "
                "weights in other formats must be converted to safetensors"
            )
        file = SafetensorsFile(path)
        return dict.fromkeys(file.names(), file)

    def _open_shards(self) -> dict[str, SafetensorsFile]:
        index = self.directory / INDEX_FILE
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: 'weight_map' must be a JSON object from tensor to file name")
        shards: dict[str, SafetensorsFile] = {}
        for name, shard in weight_map.items():
            # Reject paths, because a checkpoint must not read files outside its directory.
            if (
                not isinstance(shard, str)
                or Path(shard).name != shard
                or Path(shard).suffix != ".safetensors"
            ):
                raise CheckpointError(
                    f"{index}: tensor {name!r} is in {shard!r}, which is not the name of a safetensors file"
                )
            if shard not in shards:
                shards[shard] = SafetensorsFile(self.directory / shard)
            if name not in shards[shard]:
                raise CheckpointError(f"{index}: tensor {name!r} is not in {shard}")
        return {name: shards[shard] for name, shard in weight_map.items()}
