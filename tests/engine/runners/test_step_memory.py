"""Memory of the largest step: its plan, its measurement by the torch runner, its estimate for CPUs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch_cases import load_torch

from neso.engine.lora.adapter import LoraPlan
from neso.engine.runners.base import CacheLayout
from neso.engine.runners.step_memory import StepSize, StepTooLarge, activations_memory, logits_memory
from neso.engine.runners.torch.kv_cache import KVCache

Factory = Callable[..., Path]


def size_of(tokens: int, sequences: int, chunk: int = 512, **fields: int) -> StepSize:
    defaults = {"num_rows": sequences, "max_model_len": 200, "block_size": 16}
    return StepSize(num_tokens=tokens, num_sequences=sequences, chunk=chunk, **{**defaults, **fields})


class HostMemory(TorchDispatchMode):
    """`DeviceMemory` that follows the storages of the tensors that torch creates on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self._most = self.begun_with = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                key = storage._cdata
                if key not in self._live:
                    self._live[key] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, key, None)
        self._most = max(self._most, self.now)
        return result

    @property
    def now(self) -> int:
        return sum(self._live.values())

    def begin(self) -> None:
        self.begun_with = self._most = self.now

    def peak(self) -> int:
        return self._most - self.now

    def taken(self) -> int:
        return self.now - self.begun_with


@pytest.mark.parametrize(
    ("size", "lengths"),
    [
        (size_of(10, 3), [8, 1, 1]),
        (size_of(10, 3, chunk=4), [4, 4, 2]),
        (size_of(100, 3, chunk=4), [4, 4, 4]),
        (size_of(500, 3, max_model_len=200), [200, 200, 100]),
        (size_of(5, 5), [1] * 5),
    ],
)
def test_the_plan_has_all_tokens_and_sequences(size, lengths):
    plan = size.plan()
    assert np.diff(plan.query_start).tolist() == lengths
    assert plan.num_tokens == sum(lengths) and plan.block_tables.shape == (len(lengths), 13)
    assert plan.logits_rows.tolist() == (np.cumsum(lengths) - 1).tolist()
    assert set((plan.slots(16) // 16).tolist()) == {0}, "one block suffices"


def test_draft_tokens_have_rows_and_are_sampled():
    size = size_of(12, 2, num_rows=6)
    assert size.plan().logits_rows.tolist() == [10, 11] * 3
    assert len(size.draws()) == 6 and (size.draws().top_p < 1).all() and (size.draws().temperature > 0).all()


@pytest.fixture(scope="module")
def runner(checkpoint_factory: Factory):
    return load_torch(checkpoint_factory("llama", vocab_size=512), dtype="float32")


def measured(runner: Any, size: StepSize, encode: Callable[[], object] | None = None) -> int:
    with HostMemory() as memory:
        needed = runner.measure_step(size, memory, encode)
    assert needed.measured and not needed.graphs
    return int(needed.step)


def test_a_measured_step_covers_every_smaller_one(runner):
    """Also when the tokens are in other blocks, and sequences have a context."""
    size = size_of(96, 8, chunk=64)
    most = measured(runner, size)
    assert most >= 8 * 512 * 4, "logits"
    cache = KVCache(runner.heads, CacheLayout(64, 16), runner.dtype, runner.device)
    for smaller in (size_of(96, 2, chunk=64), size_of(8, 8)):
        plan = smaller.plan()
        with HostMemory() as memory, torch.inference_mode():
            memory.begin()
            logits = runner.forward(plan, cache, None)
            del logits
            assert memory.peak() <= most
    assert measured(runner, size_of(192, 8, chunk=64)) > most
    assert measured(runner, size_of(96, 96, chunk=64)) >= most + 88 * 512 * 4


def test_the_measured_step_has_adapters_if_the_runner_has_slots(runner, checkpoint_factory: Factory):
    size = size_of(96, 8)
    assert runner.largest_plan(size).part(LoraPlan) is None
    with_slots = load_torch(checkpoint_factory("llama", vocab_size=512), lora_slots=2, max_lora_rank=16)
    assert with_slots.largest_plan(size).part(LoraPlan).slots.tolist() == [0] * 8
    assert measured(with_slots, size) > 8 * 512 * 4


def test_the_vision_encoder_counts_if_it_needs_more(runner):
    size = size_of(96, 8)
    step = measured(runner, size)
    assert measured(runner, size, lambda: torch.zeros(step // 8)) == step
    assert measured(runner, size, lambda: torch.zeros(step)) == 4 * step


def test_a_step_without_memory_is_too_large(runner, monkeypatch):
    def forward(plan, cache, chosen):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")

    monkeypatch.setattr(runner, "forward", forward)
    with HostMemory() as memory, pytest.raises(StepTooLarge, match=r"allocate 2.00 GiB\.$"):
        runner.measure_step(size_of(96, 8), memory)


def test_the_estimate_covers_the_measured_activations(runner):
    """Contexts are short here, because plain torch operations gather them, unlike kernels."""
    size = size_of(512, 4, chunk=8, max_model_len=8)
    size = size_of(size.plan().num_tokens, 4, chunk=8, max_model_len=8)
    with HostMemory() as memory, torch.inference_mode():
        cache = KVCache(runner.heads, CacheLayout(1, 16), runner.dtype, runner.device)
        memory.begin()
        logits = runner.forward(size.plan(), cache, None)
        found = memory.peak() + logits.nbytes
    estimate = runner.step_memory(size)
    assert not estimate.measured and estimate.graphs == 0
    assert found <= estimate.step <= 4 * found
    assert estimate.step == logits_memory(size, 512) + activations_memory(size, runner.spec)
