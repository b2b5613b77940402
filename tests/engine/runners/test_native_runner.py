"""What only the native runner does: bfloat16, keys split in parts, plans from outside checked."""

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
from neso.engine.runners.base import RunnerOptions, UnsupportedOption
from neso.engine.runners.native.runner import NativeRunner
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint

Factory = Callable[..., Path]
oracle = lru_cache(load_oracle)

# Heads and groups as large models have them, so that tiles of queries fill.
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


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512", "avx512_bf16", "amx"])
@pytest.mark.parametrize("block_size", [16, 32, 5])
def test_bfloat16_stays_near_float32(
    checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch, isa: str, block_size: int
) -> None:
    """Inputs, keys and values are rounded to 8 bits, 0.2 % each; what adds up in three layers stays near 1 %."""
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


def test_plans_that_would_read_elsewhere_are_refused(llama_checkpoint: Path) -> None:
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


def test_an_unknown_instruction_set_is_named(llama_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NESO_ISA", "sse9")
    with pytest.raises(ValueError, match="unknown instruction set 'sse9'"):
        load(llama_checkpoint)


def test_fp8_is_for_gpus(llama_checkpoint: Path) -> None:
    with pytest.raises(UnsupportedOption, match="GPU"):
        load(llama_checkpoint, quantization="fp8")
