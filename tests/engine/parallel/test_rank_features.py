"""Adapters, prompt embeddings, draft trees, pooled rows and quantized checkpoints on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf_files import convert
from parallel.test_family_ranks import CASES, RUNNERS, load
from parallel.thread_ranks import ThreadRanks
from runners.plan_builder import PlanBuilder, mixed_batch, random_tokens, run

import neso._native as _native
from neso.engine.addons.input_embeddings import EmbeddingPlan
from neso.engine.lora.adapter import LoraAdapter, LoraPlan, LowRank, targets_of
from neso.engine.parallel.layout import RankLayout
from neso.engine.parallel.sharding import Shard, open_tensors, shard_of
from neso.engine.pooling.pooler import PoolingPlan
from neso.engine.runners.native.packed_decoder import pack_items
from neso.engine.runners.native.packing import PackedMatrix
from neso.engine.runners.runner_options import Quantization, RunnerOptions
from neso.engine.spec_decode.draft import DraftTreePlan
from neso.engine.specs.decoder_spec import DecoderSpec, layer_shapes
from neso.engine.specs.registry import decoder_spec
from neso.engine.thread_placement import place_threads
from neso.engine.weights.checkpoint import open_source
from neso.engine.weights.source import TensorSource

Factory = Callable[..., Path]
LAYOUTS = [(2, 1), (4, 1), (2, 2)]
ATOL = 2e-4


def random_adapter(spec: DecoderSpec, seed: int) -> LoraAdapter:
    rng = np.random.default_rng(seed)

    def update(outputs: int, inputs: int) -> LowRank:
        a, b = rng.standard_normal((3, inputs), np.float32), rng.standard_normal((outputs, 3), np.float32)
        return LowRank(a * 0.2, b * 0.2, 0.5)

    return LoraAdapter(
        tuple(
            {target: update(*layer_shapes(spec, layer)[target]) for target in targets_of(spec, layer)}  # type: ignore[misc]
            for layer in range(spec.num_layers)
        )
    )


def everything_in_a_step(ranks: ThreadRanks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, pooled rows and row states of a step with adapters, prompt embeddings, pooled rows and a draft tree."""
    for slot in range(2):
        ranks.set_adapter(slot, ranks.pack_adapter(random_adapter(ranks.spec, slot)))
    builder, rng = PlanBuilder(), np.random.default_rng(3)
    ranks.keep_row_states()
    ranks.allocate_cache(builder.layout)
    first, second = builder.sequence(random_tokens(30)), builder.sequence(random_tokens(25, seed=1))
    run(ranks, builder.plan([(first, 17), (second, 6)]))
    plan = builder.plan([(first, 5), (second, 7)], rows=[3, 4, 11])
    masks = np.array([1, 0b11, 0b101, 0b1011, 0b10101, *[0] * 7], np.uint64)
    depths = np.array([0, 1, 1, 2, 2, *range(7)], np.int32)
    parts = [
        LoraPlan(np.array([1, 0], np.int32)),
        EmbeddingPlan(
            np.array([6, 8], np.int32), rng.standard_normal((2, ranks.spec.hidden_size), np.float32)
        ),
        PoolingPlan(np.array([2, 9], np.int32)),
        DraftTreePlan(np.array([[0, 15, 16]], np.int32), masks, depths),
    ]
    logits = run(ranks, replace(plan, parts={type(part): part for part in parts}))
    return logits, ranks.hidden_states().copy(), ranks.row_states([0, 2])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "tp{}-pp{}".format(*layout))
@pytest.mark.parametrize("name", ["llama", "phi", "gemma2"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_features_of_a_step(
    checkpoint_factory: Factory, runner: str, name: str, layout: tuple[int, int]
) -> None:
    arch, overrides = CASES[name]
    directory = checkpoint_factory(arch, **overrides)
    found = everything_in_a_step(load(directory, runner, *layout))
    expected = everything_in_a_step(load(directory, runner, 1, 1))
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.size
        np.testing.assert_allclose(ours, theirs, atol=ATOL)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_K])
def test_gguf_files(checkpoint_factory: Factory, tmp_path: Path, kind: Type) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    file = convert(
        checkpoint_factory("llama", **shape),
        tmp_path / "model.gguf",
        lambda name: kind if "proj" in name or "attn_" in name or "ffn_" in name else Type.F32,
    )
    expected = mixed_batch(load(file, "reference", 1, 1))
    for layout in ((2, 1), (1, 2)):
        np.testing.assert_allclose(mixed_batch(load(file, "reference", *layout)), expected, atol=ATOL)


@pytest.mark.parametrize(("quantization", "error"), [("int8", 1e-3), ("int4", 1e-3), ("int8_dynamic", 0.1)])
def test_quantization_while_loading(
    checkpoint_factory: Factory, quantization: Quantization, error: float
) -> None:
    """Cuts at multiples of 32 keep the groups of `int8` and `int4`. Kernels round activations to 16 bits.

    Groups of `int8_dynamic` begin anew at the cuts, and activations have 8 bits. One, two and four ranks differ from
    each other by up to 7.5 %, and all differ from float32 by 10 to 11 %.
    """
    directory = checkpoint_factory("llama", hidden_size=128, intermediate_size=256)
    expected = mixed_batch(load(directory, "native", 1, 1, quantization))
    for layout in ((2, 1), (1, 2), (4, 1)):
        found = mixed_batch(load(directory, "native", *layout, quantization))
        assert np.linalg.norm(found - expected) < error * np.linalg.norm(expected)


def packed_weights(shard: Shard, source: TensorSource, quantization: Quantization) -> dict[str, np.ndarray]:
    """Values of all packed matrices of a shard by name, float32[outputs, inputs]; queries, keys and values apart."""
    spec, found = shard.spec, {}
    for name, item in pack_items(
        open_tensors(shard, source), RunnerOptions(quantization=quantization), place_threads(1)
    ):
        if not isinstance(item, PackedMatrix):
            continue
        matrix, values = item.native(), np.empty((item.outputs, item.inputs), np.float32)
        for index, row in enumerate(values):
            _native.matrix_row(matrix, index, row, "generic")
        if name.endswith("qkv"):
            queries, keys = (count * spec.head_dim for count in (spec.num_heads, spec.num_kv_heads))
            parts = np.split(values, [queries, queries + keys])
            found.update({f"{name}.{index}": part for index, part in enumerate(parts)})
        else:
            found[name] = values
    return found


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("arch", ["llama", "qwen2_moe"])
def test_quantized_weights_of_ranks_are_those_of_one_rank(
    checkpoint_factory: Factory, arch: str, quantization: Quantization
) -> None:
    """Cuts are between groups, so the codes and scales of the ranks are exactly parts of the whole's."""
    experts = {"num_experts": 2, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64}
    overrides = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 160}
    directory = checkpoint_factory(arch, **overrides, **(experts if arch == "qwen2_moe" else {}))
    with open_source(directory) as source:
        spec = decoder_spec(source.config)
        whole = packed_weights(shard_of(spec, RankLayout()), source, quantization)
        shards = [
            packed_weights(shard_of(spec, RankLayout(rank, 2)), source, quantization) for rank in (0, 1)
        ]
    for name, expected in whole.items():
        parts = [shard[name] for shard in shards]
        if name.endswith("router"):
            found = parts[1]
        else:
            assert parts[0].size < expected.size
            found = np.concatenate(parts, axis=1 if name.endswith(("output", "down")) else 0)
        np.testing.assert_array_equal(found, expected, err_msg=name)
