"""Ranks as threads of one process: a communicator, and a runner that drives the runners of all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue

import numpy as np
import torch
from torch import Tensor

import neso._native as _native
from neso.engine.lora.adapter import LoraAdapter
from neso.engine.parallel.communicator import SEGMENT_ALIGNMENT, aligned_segment
from neso.engine.parallel.layout import RankLayout
from neso.engine.parallel.sharding import Shard
from neso.engine.runners.base import CacheLayout, Float32Array, PackedAdapter, SpecRunner
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.runners.torch.runner import TorchRunner
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.weights.source import TensorSource

_TIMEOUT = 60
_PIECE = 1024


def _segment() -> np.ndarray:
    """Memory of a rank for `SharedAllReduce`, aligned to 64 bytes."""
    size = _native.SharedAllReduce.segment_bytes(_PIECE)
    return aligned_segment(np.zeros(size + SEGMENT_ALIGNMENT, np.uint8), size)


class _Group:
    """What the ranks of one model share."""

    def __init__(self, size: int) -> None:
        self.barriers: dict[range, threading.Barrier] = {}
        self.values: list[Float32Array] = [np.empty(0, np.float32)] * size
        self.segments: dict[range, list[np.ndarray]] = {}
        self.queues = {(a, b): Queue() for a in range(size) for b in range(size)}


class ThreadCommunicator:
    """A `Communicator` between threads; sums in the order of the ranks."""

    def __init__(self, layout: RankLayout, group: _Group) -> None:
        self.layout = layout
        self._group = group
        key = layout.tp_group
        self.native_all_reduce = None
        if layout.tensor_parallel > 1:
            segments = group.segments.setdefault(key, [_segment() for _ in key])
            self.native_all_reduce = _native.SharedAllReduce(segments, layout.tp_rank, _PIECE)
        self._barrier = group.barriers.setdefault(key, threading.Barrier(len(key), timeout=_TIMEOUT))

    def _exchange(self, values: Float32Array) -> list[Float32Array]:
        self._group.values[self.layout.rank] = values.copy()
        self._barrier.wait()
        found = [self._group.values[rank] for rank in self.layout.tp_group]
        self._barrier.wait()
        return found

    def all_reduce(self, values: Float32Array) -> None:
        assert values.flags.c_contiguous
        values[...] = sum(self._exchange(values))

    def gather(self, values: Float32Array) -> list[Float32Array] | None:
        found = self._exchange(values)
        return found if self.layout.tp_rank == 0 else None

    def send(self, values: Float32Array, rank: int) -> None:
        self._group.queues[self.layout.rank, rank].put(values.copy())

    def receive(self, values: Float32Array, rank: int) -> None:
        values[...] = self._group.queues[rank, self.layout.rank].get(timeout=_TIMEOUT)


def thread_communicators(tensor_parallel: int, pipeline_parallel: int) -> list[ThreadCommunicator]:
    """A communicator for each rank."""
    size = tensor_parallel * pipeline_parallel
    group = _Group(size)
    layouts = [RankLayout(rank, tensor_parallel, pipeline_parallel) for rank in range(size)]
    return [ThreadCommunicator(layout, group) for layout in layouts]


class TorchThreadRanks:
    """The collectives of the torch runner on the CPU, by a `ThreadCommunicator`."""

    def __init__(self, shard: Shard, communicator: ThreadCommunicator) -> None:
        self._shard, self._communicator = shard, communicator

    def sum(self, x: Tensor) -> None:
        if self._shard.layout.tensor_parallel > 1:
            self._communicator.all_reduce(x.numpy())

    def gather(self, logits: Tensor) -> Tensor:
        parts = self._communicator.gather(logits.numpy())
        return logits[:0] if parts is None else torch.from_numpy(np.concatenate(parts, axis=1))

    def send(self, x: Tensor) -> None:
        self._communicator.send(x.numpy(), self._shard.layout.next)

    def receive(self, num_tokens: int, dtype: torch.dtype) -> Tensor:
        x = torch.empty(num_tokens, self._shard.whole.hidden_size, dtype=dtype)
        self._communicator.receive(x.numpy(), self._shard.layout.previous)
        return x


class ThreadRanks(SpecRunner):
    """Runs each step on the runners of all ranks, each in its own thread. Behaves like the runner of rank 0."""

    def __init__(self, runners: list[SpecRunner]) -> None:
        super().__init__(runners[0].spec)
        self.runners = runners
        self.capabilities = runners[0].capabilities
        self._threads = ThreadPoolExecutor(len(runners))

    @classmethod
    def open(
        cls,
        kind: type[SpecRunner],
        spec: DecoderSpec,
        source: TensorSource,
        tensor_parallel: int,
        pipeline_parallel: int = 1,
        options: RunnerOptions | None = None,
    ) -> ThreadRanks:
        size = tensor_parallel * pipeline_parallel
        communicators = thread_communicators(tensor_parallel, pipeline_parallel)
        given = options or RunnerOptions(num_threads=1)
        runners = [kind.load(spec, source, replace(given, layout=each.layout)) for each in communicators]
        for runner, communicator in zip(runners, communicators, strict=True):
            if size == 1:
                continue
            if isinstance(runner, TorchRunner):
                runner.use_ranks(TorchThreadRanks(runner.shard, communicator))
            else:
                runner.connect(communicator)
        return cls(runners)

    @classmethod
    def load(cls, *args: object, **options: object) -> ThreadRanks:
        raise NotImplementedError

    def _on_all(self, call: Callable[[SpecRunner], object]) -> list:
        futures = [self._threads.submit(call, runner) for runner in self.runners]
        return [future.result(_TIMEOUT) for future in futures]

    def allocate_cache(self, layout: CacheLayout) -> None:
        self._on_all(lambda runner: runner.allocate_cache(layout))

    def cache_bytes_per_block(self, block_size: int) -> int:
        return max(runner.cache_bytes_per_block(block_size) for runner in self.runners)

    def step(self, plan):  # type: ignore[no-untyped-def]
        first, *others = self._on_all(lambda runner: runner.step(plan))
        assert not any(len(other) for other in others)
        return first

    def hidden_states(self) -> Float32Array:
        return self.runners[0].hidden_states()

    def row_states(self, rows: list[int]) -> Float32Array:
        return self.runners[0].row_states(rows)

    def keep_row_states(self) -> None:
        self._on_all(lambda runner: runner.keep_row_states())

    def pack_adapter(self, adapter: LoraAdapter) -> PackedAdapter:
        return _Packed([runner.pack_adapter(adapter) for runner in self.runners])

    def set_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        for index, runner in enumerate(self.runners):
            runner.set_adapter(slot, None if adapter is None else adapter.parts[index])


class _Packed:
    def __init__(self, parts: list[PackedAdapter]) -> None:
        self.parts = parts
        self.num_bytes = sum(part.num_bytes for part in parts)
