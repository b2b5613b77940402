"""An engine directory: weights that `neso build` packed for the native runner, mapped into memory as they are.

config.json                  the model's own, and in the field "neso_engine" what was built: see `BuildInfo`
rank0.packed.safetensors     packed matrices, each at a multiple of 64 bytes
rank0.vectors.safetensors    scales, norms and biases
tokenizer.json ...           copied from the checkpoint
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from neso.engine.weights.errors import CheckpointError
from neso.engine.weights.safetensors_file import SafetensorsFile
from neso.engine.weights.source import Matrix

CONFIG_FILE = "config.json"
MARK = "neso_engine"
"""The field of config.json that tells an engine directory from a checkpoint."""

FORMAT = 1
"""Version of the layout of packed weights; another one cannot be read."""


class BuildInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine was built from and how.

    - dtype: of dense weights; quantization: the scheme that was asked for, None if none was
    - tensor_parallel: ranks that the weights are split among
    - matrices: numbers of each packed matrix, by name
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
    """Whether `neso build` wrote it."""
    try:
        config = json.loads((path / CONFIG_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and MARK in config


class EngineDirectory:
    """Opens what `neso build` wrote, for one rank. A context manager; arrays stay valid after `close`.

    A `WeightSource` whose weights only the native runner can use, by `arrays` and `build`. Raises `CheckpointError`
    at opening for missing or broken files, and for a build of another format or for several ranks.
    """

    def __init__(self, directory: Path | str, rank: int = 0) -> None:
        self.directory = Path(directory)
        try:
            config = json.loads((self.directory / CONFIG_FILE).read_bytes())
            self.build = msgspec.convert(config[MARK], BuildInfo)
            self.config: dict[str, Any] = config
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.directory / CONFIG_FILE}: no engine's config: {error}") from error
        if self.build.format != FORMAT:
            raise CheckpointError(
                f"{self.directory}: the engine has format {self.build.format}, this version reads {FORMAT}; "
                "build it again with `neso build`"
            )
        if self.build.tensor_parallel != 1:
            raise CheckpointError(
                f"{self.directory}: the engine is split among {self.build.tensor_parallel} ranks, "
                "but one process runs a model here; build it with --tensor-parallel 1"
            )
        self._files = [
            SafetensorsFile(self.directory / packed_file(rank)),
            SafetensorsFile(self.directory / vectors_file(rank)),
        ]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All arrays by name, read-only views of the files."""
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
            "other runners need the checkpoint that it was built from"
        )

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> EngineDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
