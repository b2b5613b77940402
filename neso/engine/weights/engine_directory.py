"""Engine directories: weights packed by `neso build` for the native runner and memory-mapped without conversion.

config.json                  the model's config.json, plus a `BuildInfo` in the field "neso_engine"
rank0.packed.safetensors     packed matrices, each at a multiple of 64 bytes
rank0.vectors.safetensors    scales, norms and biases; a `RankInfo` in the metadata
rank1.packed.safetensors ... the same for each further rank
tokenizer.json ...           copied from the checkpoint

A rank reads config.json and its own two files, so the files of the other ranks may be on other hosts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from neso.engine.parallel.layout import SINGLE_RANK, RankLayout
from neso.engine.weights.quantized import Matrix
from neso.engine.weights.safetensors_file import SafetensorsFile
from neso.engine.weights.source import CheckpointError, TensorSource

CONFIG_FILE = "config.json"
BUILD_FIELD = "neso_engine"
"""Field of config.json that only engine directories have."""

FORMAT = 2
"""Version of the packed layout and of the division among ranks; only this version can be read."""


class BuildInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Source and options of a build.

    - dtype: of dense weights; quantization: the requested scheme, None for none
    - tensor_parallel, pipeline_parallel: numbers of ranks
    """

    format: int
    neso_version: str
    source: str
    dtype: str
    quantization: str | None
    tensor_parallel: int
    pipeline_parallel: int


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the files of one rank.

    - rank, tensor_parallel, pipeline_parallel: whose files these are
    - matrices: by name, the non-array fields of each packed matrix
    """

    rank: int
    tensor_parallel: int
    pipeline_parallel: int
    matrices: dict[str, dict[str, Any]]

    METADATA_KEY: ClassVar[str] = "neso_rank"


def read_build_info(directory: Path) -> BuildInfo | None:
    """Return the source and options of the engine in a directory; None if it is not an engine directory."""
    try:
        return msgspec.convert(json.loads((directory / CONFIG_FILE).read_bytes())[BUILD_FIELD], BuildInfo)
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
    """The packed weights of one rank. Only the native runner can read them, through `arrays`, `build` and `matrices`.

    Raises `CheckpointError` on opening for missing or invalid files, another format version, or another number of ranks
    than that of `layout`.
    """

    def __init__(self, directory: Path | str, layout: RankLayout = SINGLE_RANK) -> None:
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
        built = self.build.tensor_parallel, self.build.pipeline_parallel
        if built != (layout.tensor_parallel, layout.pipeline_parallel):
            raise CheckpointError(
                f"{self.directory}: the engine was built for tensor_parallel_size {built[0]} and "
                f"pipeline_parallel_size {built[1]}, but the options are {layout.tensor_parallel} and "
                f"{layout.pipeline_parallel}; use the sizes of the build, or build it again with "
                f"`neso build --tp {layout.tensor_parallel} --pp {layout.pipeline_parallel}`"
            )
        vectors = SafetensorsFile(self.directory / vectors_file(layout.rank))
        self.matrices = self._check_rank(vectors, layout)
        self._files = [SafetensorsFile(self.directory / packed_file(layout.rank)), vectors]

    @staticmethod
    def _check_rank(file: SafetensorsFile, layout: RankLayout) -> dict[str, dict[str, Any]]:
        """Return the fields of the packed matrices. Raises `CheckpointError` for a file of another rank."""
        try:
            info = msgspec.json.decode(file.metadata[RankInfo.METADATA_KEY], type=RankInfo)
        except (KeyError, msgspec.MsgspecError) as error:
            raise CheckpointError(
                f"{file.path}: the file has no valid information on its rank: {error}"
            ) from None
        if RankLayout(info.rank, info.tensor_parallel, info.pipeline_parallel) != layout:
            raise CheckpointError(
                f"{file.path}: the file belongs to rank {info.rank} of tensor_parallel_size {info.tensor_parallel} and "
                f"pipeline_parallel_size {info.pipeline_parallel}"
            )
        return info.matrices

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
