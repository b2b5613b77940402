"""The shard of a model that one rank runs: which heads, columns, vocabulary rows and layers (arXiv 1909.08053).

Within a stage, matrices are split so that each branch needs one sum over the tensor-parallel ranks:

    query, key, value, gate, up         by outputs: the rank's heads, or its range of intermediate columns
    output, down                        by inputs: the results of all ranks are summed
    experts, shared experts             by columns like an MLP, so that the load does not depend on the routing
    embedding, LM head                  by vocabulary rows
    query and key norms over the width  by heads, like the queries and keys that they scale
    other norms, routers, positions     whole on each rank
    biases of output and down           on the first rank, zero on the others, because they are added once

Sizes need not be multiples of the number of ranks: widths are cut at multiples of 32 where possible, key-value heads as
evenly as possible. With more ranks than key-value heads, several ranks have the same head and share its queries.

Stages have consecutive layers. The first has the embeddings, the last the final norm and the LM head.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.lora.adapter import LoraAdapter, LowRank, Target
from neso.engine.parallel.layout import RankLayout, split_evenly
from neso.engine.runners.runner_options import UnsupportedOption
from neso.engine.specs.decoder_spec import DecoderSpec, Role, layer_shapes
from neso.engine.weights.model_tensors import DecoderTensors
from neso.engine.weights.quantized import Float8Matrix, Matrix, QuantizedMatrix, take_rows
from neso.engine.weights.source import TensorSource

logger = logging.getLogger(__name__)

Float32Array = npt.NDArray[np.float32]

_UNIT = 32
"""Widths are cut at multiples of this, so that groups of quantized weights stay whole or are halved evenly."""

_QUERY: tuple[Role, ...] = ("query", "query_bias", "output")
_KEY_VALUE: tuple[Role, ...] = ("key", "value", "key_bias", "value_bias")
_MLP: tuple[Role, ...] = ("gate", "up", "gate_bias", "up_bias", "down")
_EXPERTS: tuple[Role, ...] = ("expert_gate", "expert_up", "expert_down")
_SHARED: tuple[Role, ...] = ("shared_gate", "shared_up", "shared_down")
_VOCABULARY: tuple[Role, ...] = ("embedding", "lm_head", "lm_head_bias")
BY_INPUTS: frozenset[Role] = frozenset({"output", "down", "expert_down", "shared_down"})
"""Matrices that are split along the inputs; their products are summed over the ranks."""
FIRST_RANK_ONLY: frozenset[Role] = frozenset({"output_bias", "down_bias"})
"""Biases that are added after the sum over ranks: zero on all ranks but the first."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model `whole` that the rank at `layout` runs.

    - spec: the decoder that the rank executes, with its own numbers of heads, layers, columns and vocabulary rows
    - layers: range of the model's layers
    - heads, kv_heads: ranges of query heads and key-value heads
    - columns, expert_columns, shared_columns: ranges of intermediate columns of the MLP, of each expert, and of the
      shared expert
    - vocabulary: range of rows of the embedding and the LM head
    """

    whole: DecoderSpec
    spec: DecoderSpec
    layout: RankLayout
    layers: range
    heads: range
    kv_heads: range
    columns: range
    expert_columns: range
    shared_columns: range
    vocabulary: range

    @property
    def owns_kv_heads(self) -> bool:
        """Whether this is the first of the ranks that have the same key-value heads."""
        group = self.whole.num_heads // self.whole.num_kv_heads
        return self.heads.start == self.kv_heads.start * group

    @property
    def vocabulary_sizes(self) -> list[int]:
        """Number of vocabulary rows of each rank of the stage."""
        return [len(part) for part in cut(self.whole.vocab_size, self.layout.tensor_parallel)]

    def range_of(self, role: Role) -> range | None:
        """Return the outputs of a tensor that the rank has (inputs for `BY_INPUTS`); None for all."""
        head_dim = self.whole.head_dim
        if role in _QUERY or (role == "query_norm" and self.whole.qk_norm == "width"):
            return range(self.heads.start * head_dim, self.heads.stop * head_dim)
        if role in _KEY_VALUE or (role == "key_norm" and self.whole.qk_norm == "width"):
            return range(self.kv_heads.start * head_dim, self.kv_heads.stop * head_dim)
        for roles, part in (
            (_MLP, self.columns),
            (_EXPERTS, self.expert_columns),
            (_SHARED, self.shared_columns),
            (_VOCABULARY, self.vocabulary),
        ):
            if role in roles:
                return part
        return None


def shard_of(spec: DecoderSpec, layout: RankLayout) -> Shard:
    """Return the shard of a rank. Raises `UnsupportedOption` if the model has too few heads or layers."""
    ranks, rank = layout.tensor_parallel, layout.tp_rank
    heads, kv_heads = _heads_of(spec, ranks)[rank]
    columns = cut(spec.intermediate_size, ranks)[rank]
    experts = spec.experts
    expert_columns = cut(experts.intermediate_size if experts else 0, ranks)[rank]
    shared_columns = cut((experts and experts.shared_size) or 0, ranks)[rank]
    vocabulary = cut(spec.vocab_size, ranks)[rank]
    layers = stages_of(spec, layout.pipeline_parallel)[layout.stage]
    own = slice(layers.start, layers.stop)
    names = dict(spec.tensor_names)
    untied = spec.tied_embeddings and layout.pipeline_parallel > 1
    if untied:
        # The last stage has its own copy of the embedding as LM head.
        names["lm_head"] = names["embedding"]
    if experts is not None:
        experts = replace(
            experts,
            intermediate_size=len(expert_columns),
            shared_size=None if experts.shared_size is None else len(shared_columns),
            layers=experts.layers[own],
        )
    local = replace(
        spec,
        vocab_size=len(vocabulary),
        num_layers=len(layers),
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        intermediate_size=len(columns),
        experts=experts,
        rotaries=spec.rotaries[own],
        sliding_windows=spec.sliding_windows[own],
        tied_embeddings=spec.tied_embeddings and not untied,
        has_embedding=layout.is_first_stage,
        has_head=layout.is_last_stage,
        tensor_names=names,
    )
    return Shard(
        spec, local, layout, layers, heads, kv_heads, columns, expert_columns, shared_columns, vocabulary
    )


def cut(size: int, parts: int) -> list[range]:
    """Split range(size) as evenly as possible, at multiples of 32 if there is one for each part."""
    unit = _UNIT if size >= _UNIT * parts else 1
    units = [split_evenly(-(-size // unit), parts, index) for index in range(parts)]
    return [range(part.start * unit, min(size, part.stop * unit)) for part in units]


def _heads_of(spec: DecoderSpec, ranks: int) -> list[tuple[range, range]]:
    """Return the query heads and the key-value heads of each rank.

    The queries of a rank share its key-value heads evenly, as the layer of `shard.spec` expects.
    """
    group, num_kv_heads = spec.num_heads // spec.num_kv_heads, spec.num_kv_heads
    if ranks <= num_kv_heads:
        parts = [split_evenly(num_kv_heads, ranks, rank) for rank in range(ranks)]
        return [(range(part.start * group, part.stop * group), part) for part in parts]
    if ranks > spec.num_heads:
        raise UnsupportedOption(
            f"tensor_parallel_size {ranks} is larger than the number of attention heads of the model ({spec.num_heads})"
        )
    found = []
    for head in range(num_kv_heads):
        count = len(split_evenly(ranks, num_kv_heads, head))
        for index in range(count):
            part = split_evenly(group, count, index)
            own = range(head * group + part.start, head * group + part.stop)
            found.append((own, range(head, head + 1)))
    return found


def stages_of(spec: DecoderSpec, stages: int) -> list[range]:
    """Return the layers of each stage, so that the most expensive stage is as cheap as possible.

    The cost is the number of weights that a token is multiplied with; the LM head counts for the last stage.
    Raises `UnsupportedOption` if there are fewer layers than stages.
    """
    if stages > spec.num_layers:
        raise UnsupportedOption(
            f"pipeline_parallel_size {stages} is larger than the number of layers of the model ({spec.num_layers})"
        )
    sums = np.concatenate([[0], np.cumsum([_cost(spec, layer) for layer in range(spec.num_layers)])])
    head = spec.vocab_size * spec.hidden_size
    # best[end]: the smallest maximum for the first `end` layers, and the start of the last stage.
    best = [(0.0 if end == 0 else float("inf"), 0) for end in range(spec.num_layers + 1)]
    starts: list[list[int]] = []
    for stage in range(stages):
        extra = head if stage + 1 == stages else 0
        best = [
            min(
                ((max(best[start][0], sums[end] - sums[start] + extra), start) for start in range(end)),
                default=(float("inf"), 0),
            )
            for end in range(spec.num_layers + 1)
        ]
        starts.append([start for _, start in best])
    ends = [spec.num_layers]
    for first in reversed(starts):
        ends.insert(0, first[ends[0]])
    return [range(start, end) for start, end in pairwise(ends)]


def _cost(spec: DecoderSpec, layer: int) -> int:
    total = 0
    for role, shape in layer_shapes(spec, layer).items():
        size = int(np.prod(shape))
        total += size * spec.experts.top_k if spec.experts is not None and role in _EXPERTS else size
    return total


class ShardedTensors(DecoderTensors):
    """Tensors of a shard; `spec` is `shard.spec`, and layers count from the shard's first."""

    def __init__(self, shard: Shard, source: TensorSource) -> None:
        super().__init__(shard.spec, source)
        self._shard = shard
        tied, names = shard.spec.tied_embeddings, shard.spec.tensor_names
        whole = replace(shard.whole, tied_embeddings=tied, tensor_names=names)
        self._whole = DecoderTensors(whole, source)

    def matrix(self, role: Role, layer: int | None = None, expert: int | None = None) -> Matrix:
        found = self._whole.matrix(role, self._layer(layer), expert)
        part = self._shard.range_of(role)
        if part is None or len(part) == found.shape[1 if role in BY_INPUTS else 0]:
            return found
        if role in BY_INPUTS:
            return take_columns(found, part)
        return take_rows(found, slice(part.start, part.stop))

    def vector(self, role: Role, layer: int | None = None) -> Float32Array:
        whole = self._whole.vector(role, self._layer(layer))
        if role in FIRST_RANK_ONLY and self._shard.layout.tp_rank:
            return np.zeros_like(whole)
        part = self._shard.range_of(role)
        return whole if part is None else whole[part.start : part.stop]

    def read_float32(
        self, role: Role, target: Float32Array, layer: int | None = None, expert: int | None = None
    ) -> None:
        if target.ndim == 1:
            target[...] = self.vector(role, layer)
            return
        found = self.matrix(role, layer, expert)
        np.copyto(target, found if isinstance(found, np.ndarray) else found.dequantize(), casting="unsafe")

    def table(self, role: Role) -> npt.NDArray[Any]:
        whole = self._whole.table(role)
        part = self._shard.range_of(role)
        return whole if part is None else whole[part.start : part.stop]

    def _layer(self, layer: int | None) -> int | None:
        return None if layer is None else self._shard.layers[layer]


def open_tensors(shard: Shard, source: TensorSource) -> DecoderTensors:
    """Return the tensors of a shard."""
    if shard.layout.size == 1:
        return DecoderTensors(shard.spec, source)
    return ShardedTensors(shard, source)


def take_columns(matrix: Matrix, columns: range) -> Matrix:
    """Return some of the inputs of a matrix.

    Groups of quantized weights, and float8 blocks, are divided if the cut is at a multiple of 32. Otherwise, and for
    permuted inputs (GPTQ act-order), the result is dequantized.
    """
    part = slice(columns.start, columns.stop)
    if isinstance(matrix, Float8Matrix):
        scales, width = matrix.group_scales(), matrix.block[1]
        if scales.shape[1] == 1:
            return Float8Matrix(matrix.codes[:, part], scales, (1, len(columns)))
        size = gcd(width, columns.start)
        if size % 32:
            return _dequantized_columns(matrix, part)
        blocks = np.arange(columns.start, columns.stop, size) // width
        return Float8Matrix(matrix.codes[:, part], scales[:, blocks], (1, size))
    if not isinstance(matrix, QuantizedMatrix):
        return matrix[:, part]
    size = gcd(matrix.group_size, columns.start)
    if matrix.input_order is not None or size % 32:
        return _dequantized_columns(matrix, part)
    groups = np.arange(columns.start, columns.stop, size) // matrix.group_size
    return replace(
        matrix,
        codes=matrix.codes[:, part],
        scales=matrix.scales[:, groups],
        offsets=None if matrix.offsets is None else matrix.offsets[:, groups],
        group_size=size,
    )


def _dequantized_columns(matrix: QuantizedMatrix | Float8Matrix, columns: slice) -> Matrix:
    logger.warning("a quantized matrix is dequantized, because its groups cross the shards of the ranks")
    return matrix.dequantize()[:, columns]


def shard_adapter(adapter: LoraAdapter, shard: Shard) -> LoraAdapter:
    """Return the part of a LoRA adapter that changes the matrices of a shard.

    B is split for matrices that are split by outputs, A for those that are split by inputs.
    """
    return LoraAdapter(tuple(_shard_updates(adapter.layers[layer], shard) for layer in shard.layers))


def _shard_updates(updates: Mapping[Target, LowRank], shard: Shard) -> dict[Target, LowRank]:
    found: dict[Target, LowRank] = {}
    for target, change in updates.items():
        part = shard.range_of(target)
        assert part is not None
        own = slice(part.start, part.stop)
        found[target] = (
            replace(change, a=change.a[:, own]) if target in BY_INPUTS else replace(change, b=change.b[own])
        )
    return found
