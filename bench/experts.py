"""Speedup from grouping rows by expert, compared to computing all experts for all rows.

Prints milliseconds per step of the native runner, and the ratio, for several numbers of rows. Weights are random.

usage: python bench/experts.py [--experts 16] [--top-k 2] [--threads 1] [--quantization int8] [--smoke]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.base import CacheLayout, RunnerOptions
from neso.engine.runners.native.runner import NativeRunner
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.source import TensorSource

BLOCK = 16


class RandomWeights(TensorSource):
    """Any tensor, with random values."""

    def __init__(self) -> None:
        self.directory, self.config = Path("random"), {}
        self._rng = np.random.default_rng(0)

    def __contains__(self, name: str) -> bool:
        return True

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        assert shape is not None
        return self._rng.standard_normal(shape, np.float32) * np.float32(0.05)

    def matrix(self, name: str, shape: tuple[int, int]) -> npt.NDArray[Any]:
        return self.tensor(name, shape)

    def read_float32(self, name: str, target: npt.NDArray[np.float32]) -> None:
        target[...] = self.tensor(name, target.shape)

    def close(self) -> None: ...


def milliseconds(spec: DecoderSpec, rows: int, options: RunnerOptions, runs: int) -> float:
    """Duration of the fastest of several decode steps with `rows` sequences."""
    runner = NativeRunner.load(spec, RandomWeights(), options)
    runner.allocate_cache(CacheLayout(rows, BLOCK))
    tokens = np.random.default_rng(1).integers(0, spec.vocab_size, rows).astype(np.int32)
    plan = StepPlan(
        step=1,
        sequence_ids=np.arange(rows, dtype=np.int32),
        token_ids=tokens,
        query_start=np.arange(rows + 1, dtype=np.int32),
        num_computed=np.zeros(rows, np.int32),
        block_tables=np.arange(rows, dtype=np.int32)[:, None],
        block_copies=np.empty((0, 2), np.int32),
        logits_rows=np.arange(rows, dtype=np.int32),
    )
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        runner.step(plan)
        taken.append(time.perf_counter() - start)
    return min(taken) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantization")
    parser.add_argument("--smoke", action="store_true", help="few experts and rows, to test the script")
    args = parser.parse_args()
    if args.smoke:
        args.experts = 4
    config = {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 512, "hidden_size": 512, "head_dim": 64}
    config |= {
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "norm_topk_prob": True,
    }
    config |= {"num_key_value_heads": 2, "num_experts": args.experts, "num_experts_per_tok": args.top_k}
    spec = decoder_spec({**config, "moe_intermediate_size": 768})
    assert spec.experts is not None
    every = replace(spec, experts=replace(spec.experts, top_k=args.experts))
    options = RunnerOptions(dtype="bfloat16", num_threads=args.threads, quantization=args.quantization)
    print(f"{args.experts} experts, {args.top_k} per token, bfloat16 {args.quantization or ''}")
    print(f"{'rows':>5} {'grouped ms':>11} {'all ms':>9} {'ratio':>6}")
    for rows in (1, 8) if args.smoke else (1, 8, 64, 256):
        runs = 1 if args.smoke else 20
        grouped, dense = (milliseconds(each, rows, options, runs) for each in (spec, every))
        print(f"{rows:5} {grouped:11.2f} {dense:9.2f} {dense / grouped:6.1f}")


if __name__ == "__main__":
    main()
