"""Shards of specs, tensors, quantized matrices and adapters: together they are the whole model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import ARCHITECTURES
from hypothesis import given, settings
from hypothesis import strategies as st

from neso.engine.lora.adapter import TARGETS, LoraAdapter, LowRank
from neso.engine.parallel.layout import RankLayout
from neso.engine.parallel.sharding import (
    Shard,
    cut,
    open_tensors,
    shard_adapter,
    shard_of,
    stages_of,
    take_columns,
)
from neso.engine.runners.runner_options import UnsupportedOption
from neso.engine.specs.decoder_spec import DecoderSpec, Role, all_tensors, layer_shapes, model_shapes
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.quantized import Float8Matrix, Matrix, QuantizedMatrix, dense
from neso.engine.weights.source import TensorSource

Factory = Callable[..., Path]

ROWS = {
    *("query", "key", "value", "query_bias", "key_bias", "value_bias", "gate", "up", "gate_bias", "up_bias"),
    *("expert_gate", "expert_up", "shared_gate", "shared_up", "embedding", "lm_head", "lm_head_bias"),
}
COLUMNS = {"output", "down", "expert_down", "shared_down"}
ADDED_ONCE = {"output_bias", "down_bias"}
KEY_VALUE = {"key", "value", "key_bias", "value_bias", "key_norm"}


class RandomSource(TensorSource):
    """Random tensors of any name and shape; the same name gives the same tensor."""

    directory = Path("random")

    def __contains__(self, name: str) -> bool:
        return True

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        assert shape is not None
        seed = list(name.encode())
        return np.random.default_rng(seed).standard_normal(shape, np.float32)

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        return self.tensor(name, shape)

    def read_float32(self, name: str, target: np.ndarray) -> None:
        target[...] = self.tensor(name, target.shape)

    def close(self) -> None:
        pass


def shards_of(spec: DecoderSpec, tensor_parallel: int, pipeline_parallel: int = 1) -> list[Shard]:
    size = tensor_parallel * pipeline_parallel
    return [shard_of(spec, RankLayout(rank, tensor_parallel, pipeline_parallel)) for rank in range(size)]


def check_shards_are_the_whole(spec: DecoderSpec, tensor_parallel: int, pipeline_parallel: int) -> None:
    source = RandomSource()
    whole = open_tensors(shard_of(spec, RankLayout()), source)
    shards = shards_of(spec, tensor_parallel, pipeline_parallel)
    tensors = [open_tensors(shard, source) for shard in shards]

    def read(index: int, role: Role, layer: int | None, expert: int | None) -> np.ndarray | None:
        """The part of a tensor that a rank has, from the method that runners use and from `read_float32`."""
        shard = shards[index]
        if layer is not None and layer not in shard.layers:
            return None
        own = None if layer is None else layer - shard.layers.start
        shapes = model_shapes(shard.spec) if own is None else layer_shapes(shard.spec, own)
        if role not in shapes:
            return None
        found = np.empty(shapes[role], np.float32)
        tensors[index].read_float32(role, found, own, expert)
        if found.ndim == 2:
            np.testing.assert_array_equal(dense(tensors[index].matrix(role, own, expert)), found)
        return found

    for role, layer, expert, shape in all_tensors(spec):
        expected = np.empty(shape, np.float32)
        whole.read_float32(role, expected, layer, expert)
        found = {index: read(index, role, layer, expert) for index in range(len(shards))}
        parts = {index: part for index, part in found.items() if part is not None}
        assert len({shards[index].layout.stage for index in parts}) == 1, role
        assert len(parts) == tensor_parallel
        split_norm = spec.qk_norm == "width" and role in ("query_norm", "key_norm")
        if role in KEY_VALUE and (role in ROWS or split_norm):
            parts = {index: part for index, part in parts.items() if shards[index].owns_kv_heads}
        values = list(parts.values())
        if role in ROWS or split_norm:
            np.testing.assert_array_equal(np.concatenate(values), expected)
        elif role in COLUMNS:
            np.testing.assert_array_equal(np.concatenate(values, axis=1), expected)
        elif role in ADDED_ONCE:
            np.testing.assert_array_equal(sum(values), expected)
        else:
            for value in values:
                np.testing.assert_array_equal(value, expected)
    if spec.tied_embeddings and pipeline_parallel > 1:
        head = np.concatenate(
            [open_tensors(shard, source).matrix("lm_head") for shard in shards if shard.spec.has_head]
        )
        np.testing.assert_array_equal(head, whole.matrix("embedding"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_shards_of_every_family_are_the_whole_model(checkpoint_factory: Factory, arch: str) -> None:
    config = json.loads((checkpoint_factory(arch) / "config.json").read_text())
    spec = decoder_spec(config)
    for tensor_parallel, pipeline_parallel in ((1, 1), (2, 1), (3, 2), (4, 1), (1, 3)):
        check_shards_are_the_whole(spec, tensor_parallel, pipeline_parallel)


@cache
def llama() -> DecoderSpec:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return decoder_spec(config)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), kv_heads=st.integers(1, 6), group=st.integers(1, 5), tied=st.booleans())
def test_shards_of_any_size_are_the_whole_model(
    data: st.DataObject, kv_heads: int, group: int, tied: bool
) -> None:
    spec = replace(
        llama(),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        intermediate_size=data.draw(st.integers(8, 200), "intermediate_size"),
        vocab_size=data.draw(st.integers(8, 300), "vocab_size"),
        tied_embeddings=tied,
        qk_norm=data.draw(st.sampled_from([None, "head", "width"]), "qk_norm"),
        tensor_names={
            **llama().tensor_names,
            "query_norm": "model.layers.{layer}.q_norm",
            "key_norm": "model.layers.{layer}.k_norm",
        },
    )
    tensor_parallel = data.draw(st.integers(1, min(8, kv_heads * group)), "tensor_parallel")
    check_shards_are_the_whole(spec, tensor_parallel, data.draw(st.integers(1, 5), "pipeline_parallel"))
    for shard in shards_of(spec, tensor_parallel):
        local = shard.spec
        assert local.num_heads % local.num_kv_heads == 0
        # Each query head finds its own key-value head on the rank.
        for place, head in enumerate(shard.heads):
            assert shard.kv_heads[place // (local.num_heads // local.num_kv_heads)] == head // group


@given(size=st.integers(0, 10_000), parts=st.integers(1, 16))
def test_cuts_are_even_and_at_multiples_of_32(size: int, parts: int) -> None:
    found = cut(size, parts)
    assert [value for part in found for value in part] == list(range(size))
    lengths = [len(part) for part in found]
    assert max(lengths) - min(lengths) <= (63 if size >= 32 * parts else 1)
    if size >= 32 * parts:
        assert all(part.start % 32 == 0 and len(part) for part in found)


@settings(deadline=None)
@given(
    sparse=st.lists(st.booleans(), min_size=1, max_size=12),
    stages=st.integers(1, 6),
    vocab_size=st.sampled_from([100, 5000]),
)
def test_stages_minimize_the_cost_of_the_most_expensive_stage(
    sparse: list[bool], stages: int, vocab_size: int
) -> None:
    from itertools import combinations

    from neso.engine.specs.decoder_spec import ExpertsSpec

    count = len(sparse)
    experts = ExpertsSpec(count=8, top_k=2, intermediate_size=128, normalized=True, layers=tuple(sparse))
    spec = replace(
        llama(),
        num_layers=count,
        experts=experts,
        vocab_size=vocab_size,
        rotaries=llama().rotaries[:1] * count,
        sliding_windows=(None,) * count,
    )
    if stages > count:
        with pytest.raises(UnsupportedOption, match="larger than the number of layers"):
            stages_of(spec, stages)
        return
    attention, dense_mlp = 32 * 32 * 2 + 2 * 8 * 32 + 2 * 32, 3 * 64 * 32
    costs = [attention + (8 * 32 + 2 * 3 * 128 * 32 if is_sparse else dense_mlp) for is_sparse in sparse]

    def worst(ends: tuple[int, ...]) -> int:
        bounds = [0, *ends, count]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        return max([*sums[:-1], sums[-1] + vocab_size * 32])

    found = stages_of(spec, stages)
    assert [layer for stage in found for layer in stage] == list(range(count))
    best = min(worst(ends) for ends in combinations(range(1, count), stages - 1))
    assert worst(tuple(stage.stop for stage in found[:-1])) == best


def test_too_many_ranks_are_rejected() -> None:
    with pytest.raises(UnsupportedOption, match=r"number of attention heads of the model \(8\)"):
        shard_of(llama(), RankLayout(0, 9))
    with pytest.raises(UnsupportedOption, match=r"number of layers of the model \(5\)"):
        shard_of(llama(), RankLayout(0, 1, 6))


@settings(deadline=None)
@given(
    inputs=st.integers(1, 9).map(lambda count: 32 * count),
    group_size=st.sampled_from([32, 64, 96, 128, 288]),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    permuted=st.booleans(),
    bounds=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    shift=st.sampled_from([0, 0, 8]),
)
def test_columns_of_quantized_matrices(
    inputs: int,
    group_size: int,
    bits: int,
    symmetric: bool,
    permuted: bool,
    bounds: tuple[int, int],
    shift: int,
) -> None:
    rng = np.random.default_rng(0)
    groups = (6, -(-inputs // group_size))
    order = rng.permutation(inputs).astype(np.int32) if permuted else None
    matrix = QuantizedMatrix(
        rng.integers(0, 2**bits, (6, inputs)).astype(np.uint8),
        rng.random(groups, np.float32),
        None if symmetric else rng.random(groups, np.float32),
        bits,
        group_size,
        order,
    )
    start, stop = sorted(min(inputs, 32 * bound + shift) for bound in bounds)
    found = take_columns(matrix, range(start, stop))
    np.testing.assert_array_equal(dense(found), matrix.dequantize()[:, start:stop])
    assert isinstance(found, QuantizedMatrix) == (not permuted and start % 32 == 0)


@pytest.mark.parametrize("block", [(1, 64), (8, 64), (4, 16)])
def test_columns_of_float8_matrices(block: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((8, 64)).astype(ml_dtypes.float8_e4m3fn)
    grid = -(-8 // block[0]), -(-64 // block[1])
    matrix = Float8Matrix(codes, rng.random(grid, np.float32), block)
    found = take_columns(matrix, range(24, 64))
    np.testing.assert_array_equal(dense(found), matrix.dequantize()[:, 24:])
    assert isinstance(found, Float8Matrix) == (block[1] == 64)


@pytest.mark.parametrize("layout", [(2, 1), (4, 1), (3, 2)])
def test_updates_of_adapter_shards_are_those_of_the_whole_adapter(layout: tuple[int, int]) -> None:
    rng, spec = np.random.default_rng(0), llama()

    def update(outputs: int, inputs: int) -> LowRank:
        return LowRank(rng.random((3, inputs), np.float32), rng.random((outputs, 3), np.float32), 2.0)

    adapter = LoraAdapter(
        tuple(
            {target: update(*layer_shapes(spec, layer)[target]) for target in TARGETS}  # type: ignore[misc]
            for layer in range(spec.num_layers)
        )
    )
    seen: dict[tuple[int, str], list[Any]] = {}
    for shard in shards_of(spec, *layout):
        part = shard_adapter(adapter, shard)
        part.check(shard.spec, max_rank=3)
        for layer, target, change in part.matrices():
            if target not in ("key", "value") or shard.owns_kv_heads:
                seen.setdefault((shard.layers[layer], target), []).append(change.b @ change.a)
    for layer, target, change in adapter.matrices():
        parts = seen[layer, target]
        found = np.concatenate(parts, axis=1 if target in ("output", "down") else 0)
        np.testing.assert_allclose(found, change.b @ change.a, rtol=1e-5)
