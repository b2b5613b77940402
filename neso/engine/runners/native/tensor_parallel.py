"""Shard of one rank of a model split by tensor parallelism (Megatron-LM, arXiv 1909.08053).

Queries, keys, values, gate and up are split by outputs (whole heads), output and down by inputs. Norms, embedding,
lm_head and routers are replicated. Biases that are added after the sum over ranks are zero on all ranks but the first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.runners.runner_options import UnsupportedOption
from neso.engine.specs.decoder_spec import DecoderSpec, Role
from neso.engine.weights.model_tensors import DecoderTensors
from neso.engine.weights.quantized import Float8Matrix, Matrix, QuantizedMatrix, take_rows
from neso.engine.weights.source import TensorSource

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
    "expert_gate",
    "expert_up",
    "shared_gate",
    "shared_up",
)
_BY_INPUTS: tuple[Role, ...] = ("output", "down", "expert_down", "shared_down")
_FIRST_RANK_ONLY: tuple[Role, ...] = ("output_bias", "down_bias")


def shard_spec(spec: DecoderSpec, ranks: int) -> DecoderSpec:
    """Return the decoder that each rank runs. Raises `UnsupportedOption` if the model cannot be divided by `ranks`."""
    sizes = {field: getattr(spec, field) for field in ("num_heads", "num_kv_heads", "intermediate_size")}
    experts = spec.experts
    if experts is not None:
        sizes["experts.intermediate_size"] = experts.intermediate_size
        sizes["experts.shared_size"] = experts.shared_size or 0
    for field, size in sizes.items():
        if size % ranks:
            raise UnsupportedOption(f"tensor_parallel {ranks} does not divide {field} of the model ({size})")
    if spec.qk_norm == "width" and ranks > 1:
        raise UnsupportedOption("tensor_parallel does not split models with norms over all heads")
    if experts is not None:
        experts = dataclasses.replace(
            experts,
            intermediate_size=experts.intermediate_size // ranks,
            shared_size=experts.shared_size and experts.shared_size // ranks,
        )
    return dataclasses.replace(
        spec,
        num_heads=spec.num_heads // ranks,
        num_kv_heads=spec.num_kv_heads // ranks,
        intermediate_size=spec.intermediate_size // ranks,
        experts=experts,
    )


class ShardedTensors(DecoderTensors):
    """Tensors of one rank. `spec` describes the whole model."""

    def __init__(self, spec: DecoderSpec, source: TensorSource, rank: int, ranks: int) -> None:
        super().__init__(spec, source)
        self._rank = rank
        self._ranks = ranks

    def matrix(self, role: Role, layer: int | None = None, expert: int | None = None) -> Matrix:
        found = super().matrix(role, layer, expert)
        if isinstance(found, Float8Matrix):
            # Packed as a dense matrix in any case, and shard boundaries may split blocks.
            found = found.dequantize()
        if role in _BY_OUTPUTS:
            return take_rows(found, self._range(found.shape[0]))
        if role in _BY_INPUTS:
            return _columns(found, self._range(found.shape[1]))
        return found

    def vector(self, role: Role, layer: int | None = None) -> npt.NDArray[np.float32]:
        whole = super().vector(role, layer)
        if role in _BY_OUTPUTS:
            return whole[self._range(len(whole))]
        if role in _FIRST_RANK_ONLY and self._rank:
            whole[...] = 0
        return whole

    def _range(self, size: int) -> slice:
        width = size // self._ranks
        return slice(self._rank * width, (self._rank + 1) * width)


def _columns(matrix: npt.NDArray[Any] | QuantizedMatrix, columns: slice) -> Matrix:
    if not isinstance(matrix, QuantizedMatrix):
        return matrix[:, columns]
    size = matrix.group_size
    if matrix.input_order is not None or columns.start % size or columns.stop % size:
        # Shard boundaries would split groups.
        return matrix.dequantize()[:, columns]
    groups = slice(columns.start // size, columns.stop // size)
    return dataclasses.replace(
        matrix,
        codes=matrix.codes[:, columns],
        scales=matrix.scales[:, groups],
        offsets=None if matrix.offsets is None else matrix.offsets[:, groups],
    )
