"""The share of one rank in a model split by tensor parallelism (Megatron-LM, arXiv 1909.08053).

Queries, keys, values, gate and up are split by outputs (whole heads), output and down by inputs, the vocabulary of
lm_head by rows. Norms, the embedding and the biases that are added after the sum over ranks are whole in each rank;
only the first rank has those biases, the others have zeros.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.runners.base import UnsupportedOption
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.tensor_roles import Role, Shape, layer_shapes, model_shapes
from neso.engine.weights.float8_matrix import Float8Matrix
from neso.engine.weights.quantized_matrix import QuantizedMatrix
from neso.engine.weights.source import Matrix, WeightSource

_BY_OUTPUTS: tuple[Role, ...] = (
    "query",
    "key",
    "value",
    "query_bias",
    "key_bias",
    "value_bias",
    "gate",
    "up",
    "gate_bias",
    "up_bias",
)
_BY_INPUTS: tuple[Role, ...] = ("output", "down")
_OF_FIRST_RANK: tuple[Role, ...] = ("output_bias", "down_bias")


def shard_spec(spec: DecoderSpec, ranks: int) -> DecoderSpec:
    """The decoder that each rank runs. Raises `UnsupportedOption` for a number of ranks that does not divide it."""
    for field in ("num_heads", "num_kv_heads", "intermediate_size"):
        if getattr(spec, field) % ranks:
            raise UnsupportedOption(
                f"tensor_parallel {ranks} does not divide {field} of the model ({getattr(spec, field)})"
            )
    return dataclasses.replace(
        spec,
        num_heads=spec.num_heads // ranks,
        num_kv_heads=spec.num_kv_heads // ranks,
        intermediate_size=spec.intermediate_size // ranks,
    )


class ShardedSource:
    """A `WeightSource` of one rank's shares of another's tensors."""

    def __init__(self, source: WeightSource, spec: DecoderSpec, rank: int, ranks: int) -> None:
        self.directory: Path = source.directory
        self.config: dict[str, Any] = source.config
        self._source = source
        self._rank = rank
        self._ranks = ranks
        shapes: dict[Role, Shape] = {**model_shapes(spec), **layer_shapes(spec)}
        self._roles: dict[str, tuple[Role, Shape]] = {
            spec.tensor_name(role, layer): (role, shape)
            for role, shape in shapes.items()
            for layer in range(spec.num_layers)
        }

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        return self._source.tensor(name, shape)

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        role, whole = self._roles[name]
        found = self._source.matrix(name, (whole[0], whole[1]))
        if isinstance(found, Float8Matrix):
            # It is packed dense anyway, and a share's edges need not be those of blocks.
            found = found.dequantize()
        if role in _BY_OUTPUTS:
            return _rows(found, *self._range(whole[0]))
        if role in _BY_INPUTS:
            return _columns(found, *self._range(whole[1]))
        return found

    def read_float32(self, name: str, target: npt.NDArray[np.float32]) -> None:
        role, whole = self._roles[name]
        full = np.empty(whole, np.float32)
        self._source.read_float32(name, full)
        if role in _BY_OUTPUTS:
            begin, end = self._range(whole[0])
            full = full[begin:end]
        elif role in _OF_FIRST_RANK and self._rank:
            full[...] = 0
        target[...] = full

    def _range(self, size: int) -> tuple[int, int]:
        share = size // self._ranks
        return self._rank * share, (self._rank + 1) * share

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> ShardedSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _rows(matrix: npt.NDArray[Any] | QuantizedMatrix, begin: int, end: int) -> Matrix:
    if not isinstance(matrix, QuantizedMatrix):
        return matrix[begin:end]
    return dataclasses.replace(
        matrix,
        codes=matrix.codes[begin:end],
        scales=matrix.scales[begin:end],
        offsets=None if matrix.offsets is None else matrix.offsets[begin:end],
    )


def _columns(matrix: npt.NDArray[Any] | QuantizedMatrix, begin: int, end: int) -> Matrix:
    if not isinstance(matrix, QuantizedMatrix):
        return matrix[:, begin:end]
    size = matrix.group_size
    if matrix.input_order is not None or begin % size or end % size:
        # Groups would be torn apart.
        return matrix.dequantize()[:, begin:end]
    groups = slice(begin // size, end // size)
    return dataclasses.replace(
        matrix,
        codes=matrix.codes[:, begin:end],
        scales=matrix.scales[:, groups],
        offsets=None if matrix.offsets is None else matrix.offsets[:, groups],
    )
