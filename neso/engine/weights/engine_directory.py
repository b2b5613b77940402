"""Engine directories: weights packed by `neso build` for the native runner and memory-mapped without conversion.

config.json                  the model's config.json, plus a `BuildInfo` in the field "neso_engine"
rank0.packed.safetensors     packed matrices, each at a multiple of 64 bytes
rank0.vectors.safetensors    scales, norms and biases
tokenizer.json ...           copied from the checkpoint
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from neso.engine.weights.quantized import Matrix
from neso.engine.weights.safetensors_file import SafetensorsFile
from neso.engine.weights.source import CheckpointError, TensorSource

CONFIG_FILE = "config.json"
BUILD_FIELD = "neso_engine"
"""Field of config.json that only engine directories have."""

FORMAT = 1
"""Version of the packed layout; only this version can be read."""


class BuildInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Source and options of a build.

    - dtype: of dense weights; quantization: the requested scheme, None for none
    - tensor_parallel: number of ranks
    - matrices: by name, the non-array fields of each packed matrix
    """

    format: int
    neso_version: str
    source: str
    dtype: str
    quantization: str | None
    tensor_parallel: int
    matrices: dict[str, dict[str, Any]]


def packed_file(rank: int) -> str:
    return f"rank{rank}.packed.safetensors"


def vectors_file(rank: int) -> str:
    return f"rank{rank}.vectors.safetensors"


def is_engine_directory(path: Path) -> bool:
    """Whether a directory was written by `neso build`."""
    try:
        config = json.loads((path / CONFIG_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and BUILD_FIELD in config


class EngineDirectory(TensorSource):
    """The packed weights of one rank. Only the native runner can read them, through `arrays` and `build`.

    Raises `CheckpointError` on opening for missing or invalid files, another format version, or several ranks.
    """

    def __init__(self, directory: Path | str, rank: int = 0) -> None:
        self.directory = Path(directory)
        try:
            config = json.loads((self.directory / CONFIG_FILE).read_bytes())
            self.build = msgspec.convert(config[BUILD_FIELD], BuildInfo)
            self.config: dict[str, Any] = config
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.directory / CONFIG_FILE}: not the config.json of an engine directory: {error}"
            ) from error
        if self.build.format != FORMAT:
            raise CheckpointError(
                f"{self.directory}: the engine has format {self.build.format}, this version reads {FORMAT}; "
                "build it again with `neso build`"
            )
        if self.build.tensor_parallel != 1:
            raise CheckpointError(
                f"{self.directory}: the engine is split among {self.build.tensor_parallel} ranks, "
                "but only one rank is supported; build it with --tensor-parallel 1"
            )
        self._files = [
            SafetensorsFile(self.directory / packed_file(rank)),
            SafetensorsFile(self.directory / vectors_file(rank)),
        ]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all arrays by name: read-only views of the files."""
        return {name: file.tensor(name) for file in self._files for name in file.names()}

    def __contains__(self, name: str) -> bool:
        return any(name in file for file in self._files)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        raise self._packed()

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        raise self._packed()

    def read_float32(self, name: str, target: npt.NDArray[np.float32]) -> None:
        raise self._packed()

    def _packed(self) -> CheckpointError:
        return CheckpointError(
            f"{self.directory}: an engine directory holds weights packed for the native runner; "
            "other runners need the original checkpoint"
        )

    def close(self) -> None:
        for file in self._files:
            file.close()
