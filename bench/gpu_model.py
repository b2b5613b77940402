"""A Llama with random weights, step plans and timing, for the benchmarks of the torch runner on a GPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.torch.device_runner import DeviceLogits
from neso.engine.runners.torch.runner import TorchRunner
from neso.engine.weights.source import TensorSource

BLOCK_SIZE = 16
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
CLOSE = 0.1
"""Relative error between the logits of two implementations in bfloat16 with the same weights; unrelated ones have 1.4.
`tests/gpu` has narrow bounds."""


def llama_config(shape: str, layers: int | None = None, max_positions: int = 8192) -> dict[str, Any]:
    """Return the config of a model of `SHAPES`, with another number of layers if given."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        **SHAPES[shape],
    }
    return config if layers is None else config | {"num_hidden_layers": layers}


def layers_that_fit() -> int:
    """Return the layers of the shape 8b that the first GPU has memory for, with the cache of the largest batch."""
    gigabytes = torch.cuda.mem_get_info()[1] / 2**30 if torch.cuda.is_available() else 0
    return 32 if gigabytes > 36 else 16 if gigabytes > 20 else 8


class RandomWeights(TensorSource):
    """Random bfloat16 weights, cut from one pool of random numbers."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.directory, self.config = Path("random"), config
        # Not a multiple of the width of a matrix, so that no two rows are equal.
        pool = np.random.default_rng(0).standard_normal((1 << 22) + 3, np.float32) * 0.02
        self._pool = pool.astype(ml_dtypes.bfloat16)

    def __contains__(self, name: str) -> bool:
        return not name.endswith("bias")

    def matrix(self, name: str, shape: tuple[int, int]) -> np.ndarray:
        # Another part of the pool for each matrix.
        start = sum(name.encode()) * 997 % len(self._pool)
        return np.resize(np.roll(self._pool, -start), shape)

    def read_float32(self, name: str, target: np.ndarray) -> None:
        target[...] = 1.0

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        raise NotImplementedError

    def close(self) -> None: ...


def plan(batch: int, new_tokens: int, context: int, block_size: int = BLOCK_SIZE) -> StepPlan:
    """Plan of `batch` sequences with `new_tokens` each, after `context` tokens, with logits of their last tokens."""
    blocks = -(-(context + new_tokens) // block_size)
    starts = np.arange(batch + 1, dtype=np.int32) * new_tokens
    return StepPlan(
        step=1,
        sequence_ids=np.arange(batch, dtype=np.int32),
        token_ids=(np.arange(batch * new_tokens, dtype=np.int32) + context) % 500,
        query_start=starts,
        num_computed=np.full(batch, context, np.int32),
        block_tables=np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks),
        block_copies=np.empty((0, 2), np.int32),
        logits_rows=starts[1:] - 1,
    )


def fill_cache(runner: TorchRunner) -> None:
    """Fill the cache with random numbers: with zeros, attention would not depend on its scores."""
    assert runner._cache is not None
    for layer in runner._cache.layers:
        layer.keys.normal_()
        layer.values.normal_()


def logits_of(runner: TorchRunner, step: StepPlan) -> Tensor:
    """Run a step; returns its logits on the device, valid until the next step."""
    logits = runner.step(step)
    assert isinstance(logits, DeviceLogits)
    return logits.values


def release() -> None:
    """Free the memory of the GPU that nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(function: Callable[[], object], runs: int = 20, warm_ups: int = 3) -> float:
    """Median seconds of a call from its start until the GPU has finished. The warm-ups compile its kernels."""
    for _ in range(warm_ups):
        function()
    synchronize()
    taken = []
    for _ in range(runs):
        started = time.perf_counter()
        function()
        synchronize()
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a CUDA graph; the function itself without a GPU."""
    if not torch.cuda.is_available():
        return function
    # Compiles kernels, which cannot be captured.
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def device_seconds(function: Callable[[], object], runs: int = 20) -> float:
    """Median seconds that the GPU takes for a call, by its events: in a CUDA graph, without the time of launches."""
    if not torch.cuda.is_available():
        return seconds(function, runs, warm_ups=0)
    replay = captured(function)
    for _ in range(3):
        replay()
    taken = []
    for _ in range(runs):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        replay()
        ended.record()
        ended.synchronize()
        taken.append(started.elapsed_time(ended) / 1e3)
    return float(np.median(taken))


def relative_error(found: Tensor, expected: Tensor) -> float:
    expected = expected.float()
    return float((found.float() - expected).norm() / expected.norm())


def check_close(name: str, found: Tensor, expected: Tensor, limit: float = CLOSE) -> float:
    """Return the relative error. Raises `RuntimeError` if it is not below `limit`."""
    error = relative_error(found, expected)
    if not error < limit:
        raise RuntimeError(f"{name}: relative error {error:.3g}, at most {limit} is expected")
    return error
