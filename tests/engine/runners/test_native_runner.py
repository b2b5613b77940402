"""The native runner: bfloat16, keys split among threads, validation of plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import load_oracle
from plan_builder import PlanBuilder, oracle_logits, random_tokens, run_in_chunks

import neso._native as _native
from neso.engine.addons.input_embeddings import NO_EMBEDDINGS
from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.native.runner import NativeRunner
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
from neso.engine.spec_decode.draft import NO_SLOT_COPIES, NO_TREE, DraftTreePlan
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint

Factory = Callable[..., Path]
oracle = lru_cache(load_oracle)

# Heads and groups as in large models, so that query tiles are filled.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}


def load(directory: Path, **options: Any) -> NativeRunner:
    with Checkpoint(directory) as checkpoint:
        return NativeRunner.load(decoder_spec(checkpoint.config), checkpoint, RunnerOptions(**options))


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512", "avx512_bf16", "amx", "neon_dot", "neon_bf16"])
@pytest.mark.parametrize("block_size", [16, 32, 5])
def test_bfloat16_is_close_to_float32(
    checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch, isa: str, block_size: int
) -> None:
    """Inputs, keys and values are rounded to 8 bits, 0.2 % each; over three layers this accumulates to about 1 %."""
    if isa not in _native.supported_isas():
        pytest.skip(f"this CPU has no {isa}")
    monkeypatch.setenv("NESO_ISA", isa)
    directory = checkpoint_factory("llama", **SHAPE, dtype="bfloat16")
    runner = load(directory)
    assert runner.isa == isa
    tokens = random_tokens(330)
    expected = oracle_logits(oracle(directory), tokens)
    for sizes in ([330], [200, 1, 1, 9, 70, 49], [17] * 19 + [7]):
        builder = PlanBuilder(block_size, 256)
        runner.allocate_cache(builder.layout)
        assert error(run_in_chunks(runner, builder, tokens, sizes), expected) < 0.03


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_of_long_contexts_are_split_among_threads(checkpoint_factory: Factory, dtype: str) -> None:
    directory = checkpoint_factory("llama", **SHAPE)
    tokens = random_tokens(1700)
    expected = oracle_logits(oracle(directory), tokens)[-3:]
    results = []
    for threads in (1, 2, 8):
        runner = load(directory, dtype=dtype, num_threads=threads)
        builder = PlanBuilder(16, 256)
        runner.allocate_cache(builder.layout)
        sequence = builder.sequence(tokens)
        runner.step(builder.plan([(sequence, 1697)], rows=[]))
        rows = [runner.step(builder.plan([(sequence, 1)]))[0].copy() for _ in range(3)]
        results.append(np.array(rows))
        assert error(results[-1], expected) < (1e-5 if dtype == "float32" else 0.03)


def test_plans_out_of_bounds_are_rejected(llama_checkpoint: Path) -> None:
    runner = load(llama_checkpoint)
    builder = PlanBuilder(4, 8)
    with pytest.raises(RuntimeError, match="allocate_cache"):
        runner.step(builder.plan([(builder.sequence([7]), 1)]))
    runner.allocate_cache(builder.layout)
    vocab = runner.spec.vocab_size
    with pytest.raises(ValueError, match=rf"token id {vocab} is not in \[0, {vocab}\)"):
        runner.step(builder.plan([(builder.sequence([7, vocab]), 2)]))
    sequence = builder.sequence([7, 8])
    plan = builder.plan([(sequence, 2)])
    broken = np.full_like(plan.block_tables, 8)
    object.__setattr__(plan, "block_tables", broken)
    with pytest.raises(ValueError, match=r"block 8 is not in \[0, 8\)"):
        runner.step(plan)


def int32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def float32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def arguments_of(runner: NativeRunner, plan: StepPlan) -> dict[str, Any]:
    """The arguments that the runner passes to the decoder."""
    tables = runner._rotary.lookup(plan.positions()).values()
    names = ("token_ids", "query_start", "num_computed", "block_tables", "block_copies")
    return {
        **{name: getattr(plan, name) for name in names},
        "embedding_positions": NO_EMBEDDINGS.positions,
        "embeddings": NO_EMBEDDINGS.rows,
        "slot_copies": NO_TREE.slot_copies,
        "tree_depths": NO_TREE.depths,
        "tree_masks": NO_TREE.masks,
        "adapter_slots": None,
        "wanted_rows": plan.logits_rows,
        "rotary": list(tables),
        "logits": float32(len(plan.logits_rows), runner.vocab_size),
        "hidden": float32(0, runner.hidden_size),
    }


def tree_part(*depths: int) -> DraftTreePlan:
    return DraftTreePlan(NO_SLOT_COPIES, np.ones(len(depths), np.uint64), int32(*depths))


def tree(*depths: int) -> dict[str, np.ndarray]:
    part = tree_part(*depths)
    return {"tree_masks": part.masks, "tree_depths": part.depths}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start": int32(0, 3)}, "query_start must have a place for each end"),
        ({"query_start": int32(0, 3, 2)}, "query_start must go from 0"),
        ({"query_start": int32(1, 2, 3)}, "query_start must go from 0"),
        ({"query_start": int32(0, 3, 3)}, "query_start must ascend"),
        ({"query_start": int32(0, -9, 3)}, "query_start must ascend"),
        ({"block_tables": int32([0, 1])}, "a block table for each sequence"),
        (
            {"query_start": int32(0), "num_computed": int32(), "block_tables": np.zeros((0, 3), np.int32)},
            "must have a sequence",
        ),
        ({"num_computed": int32(0, -5)}, "number of computed tokens -5 is not in"),
        ({"num_computed": int32(0, 2**31 - 1)}, "number of computed tokens 2147483647 is not in"),
        ({"num_computed": int32(11, 0)}, "a block table is too short"),
        ({"block_copies": int32([0])}, "a copy of a block must be a pair"),
        ({"slot_copies": int32([0, 1])}, "a copy of a slot must be three numbers"),
        ({"slot_copies": int32([0, 1, 12])}, "position 12 is not in"),
        ({"adapter_slots": int32(-1)}, "a slot of an adapter for each sequence"),
        (tree(0, 1), "a tree must have a mask and a depth for each token"),
        (tree(0, -1, 0), "depth -1 is not in"),
        (tree(0, 2, 0), "depth 2 is not in"),
        ({"rotary": []}, "a table for each rotation"),
        ({"rotary": [(float32(2, 6), float32(2, 6))]}, "cosines and sines for each token"),
        ({"rotary": [(float32(3, 6), float32(3, 5))]}, "cosines and sines for each token"),
        ({"rotary": [(float32(3, 7), float32(3, 7))]}, "wider than a head"),
        ({"logits": float32(3, 383)}, "a row of logits must have a value for each token"),
        ({"logits": float32(2, 384)}, "for each wanted token"),
        ({"hidden": float32(1, 48)}, "for each wanted token"),
        ({"logits": float32(2, 384), "hidden": float32(1, 47)}, "hidden states must have hidden_size"),
    ],
)
def test_steps_with_invalid_arrays_are_rejected(
    llama_checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    runner = load(llama_checkpoint)
    builder = PlanBuilder(4, 8)
    plan = builder.plan([(builder.sequence([7, 8]), 2), (builder.sequence([9]), 1)])
    arguments = arguments_of(runner, plan)
    with pytest.raises(ValueError, match="allocate_cache must come before the first step"):
        runner._decoder.step(**arguments)
    runner.allocate_cache(builder.layout)
    runner._decoder.step(**arguments)
    assert arguments["logits"].all()
    with pytest.raises(ValueError, match=message):
        runner._decoder.step(**{**arguments, **changes})


def test_trees_wider_than_a_mask_are_rejected(llama_checkpoint: Path) -> None:
    runner = load(llama_checkpoint)
    builder = PlanBuilder(16, 16)
    runner.allocate_cache(builder.layout)
    plan = builder.plan([(builder.sequence(random_tokens(65)), 65)])
    with pytest.raises(ValueError, match="more nodes than a mask has bits"):
        runner.step(plan.with_part(tree_part(*[1] * 65)))


def test_learned_positions_are_bounded(checkpoint_factory: Factory) -> None:
    runner = load(checkpoint_factory("gpt2", n_positions=8, max_position_embeddings=8))
    builder = PlanBuilder(4, 8)
    runner.allocate_cache(builder.layout)
    with pytest.raises(ValueError, match="longer than the positions"):
        runner.step(builder.plan([(builder.sequence([7] * 9), 9)]))
    plan = builder.plan([(builder.sequence([7] * 9), 9)])
    assert np.isfinite(runner.step(plan.with_part(tree_part(*range(8), 7)))).all()


def adapter(inputs: int = 48, first_output: int = 0, outputs: int = 48, layers: int = 3) -> _native.Adapter:
    """An adapter of the first layer's output projection."""
    made = _native.Adapter("f32", layers)
    padded = -(-inputs // 32) * 32
    made.add_product(0, 1, inputs, np.zeros(2 * padded * 4, np.uint8), np.ones(2, np.float32))
    made.add_part(0, 1, first_output, outputs, 2, np.zeros(-(-outputs // 16) * 16 * 2 * 4, np.uint8))
    return made


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"inputs": 47}, "another number of inputs"),
        ({"inputs": 4096}, "another number of inputs"),
        ({"outputs": 49}, "more outputs"),
        ({"first_output": 1}, "more outputs"),
        ({"first_output": 2**31 - 1}, "more outputs"),
        ({"layers": 4}, "another number of layers"),
    ],
)
def test_adapters_of_another_size_are_rejected(
    llama_checkpoint: Path, sizes: dict[str, int], message: str
) -> None:
    runner = load(llama_checkpoint)
    runner._decoder.set_adapter(0, adapter())
    with pytest.raises(ValueError, match=message):
        runner._decoder.set_adapter(0, adapter(**sizes))


def test_unknown_instruction_set_is_named_in_the_error(
    llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NESO_ISA", "sse9")
    with pytest.raises(ValueError, match="unknown instruction set 'sse9'"):
        load(llama_checkpoint)


def test_fp8_is_rejected_on_cpu(llama_checkpoint: Path) -> None:
    with pytest.raises(UnsupportedOption, match="GPU"):
        load(llama_checkpoint, quantization="fp8")
