"""Execution of steps on several ranks: the runner of rank 0, and the loop of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from neso.engine.addons.registry import PLAN_PARTS
from neso.engine.core.scheduler_config import StepLimits
from neso.engine.core.step_plan import StepPlan
from neso.engine.lora.adapter import LoraAdapter
from neso.engine.parallel.micro_batches import micro_batches
from neso.engine.parallel.plan_channel import PlanReceiver, PlanSender
from neso.engine.parallel.plan_codec import (
    AllocateCache,
    PlanCodec,
    RankCommand,
    RunStep,
    SetAdapter,
    Stop,
    pack_adapter,
    unpack_adapter,
)
from neso.engine.runners.base import CacheLayout, Float32Array, Logits, PackedAdapter, SpecRunner
from neso.engine.runners.runner_options import DEFAULT_OPTIONS, RunnerOptions
from neso.engine.sampling.token_sampling import SamplingBatch
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.weights.source import TensorSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankedAdapter:
    """An adapter packed for rank 0, and the whole adapter, which is sent to the other ranks when it gets a slot."""

    own: PackedAdapter
    whole: LoraAdapter

    @property
    def num_bytes(self) -> int:
        return self.own.num_bytes


class RankedRunner(SpecRunner):
    """Sends every operation that changes a rank to the other ranks, then executes it on the runner of rank 0.

    - num_stages: number of pipeline stages
    - block_bytes, free_memory: of the ranks with the largest KV cache blocks and the least memory
    - fail: ends the process. After an error in a step, the other ranks are blocked in a collective operation.
    """

    def __init__(
        self,
        own: SpecRunner,
        plans: PlanSender,
        num_stages: int,
        block_bytes: int,
        free_memory: int,
        fail: Callable[[BaseException], NoReturn],
    ) -> None:
        super().__init__(own.spec)
        self._own, self._plans, self._fail = own, plans, fail
        self._num_stages = num_stages
        self._block_bytes, self._free_memory = block_bytes, free_memory
        self._codec = PlanCodec(PLAN_PARTS)
        self.capabilities = own.capabilities

    @classmethod
    def load(
        cls, spec: DecoderSpec, source: TensorSource, options: RunnerOptions = DEFAULT_OPTIONS
    ) -> SpecRunner:
        raise NotImplementedError("ranks are loaded by their own runners")

    @property
    def name(self) -> str:
        return self._own.name

    @property
    def default_limits(self) -> StepLimits:
        return self._own.default_limits

    @property
    def share_of_free_memory(self) -> float:
        return self._own.share_of_free_memory

    def free_memory(self) -> int:
        return self._free_memory

    def device_memory(self) -> int:
        return self._own.device_memory()

    def cache_bytes_per_block(self, block_size: int) -> int:
        return self._block_bytes

    def allocate_cache(self, layout: CacheLayout) -> None:
        self._send(
            AllocateCache(layout.num_blocks, layout.block_size, layout.num_host_blocks, layout.max_num_seqs)
        )
        self._own.allocate_cache(layout)

    def step(self, plan: StepPlan) -> Logits:
        self._send(self._codec.pack_plan(plan))
        try:
            return run_step(self._own, plan, self._num_stages)
        except Exception as error:
            self._fail(error)

    def hidden_states(self) -> Float32Array:
        return self._own.hidden_states()

    def keep_row_states(self) -> None:
        self._own.keep_row_states()

    def row_states(self, rows: list[int]) -> Float32Array:
        return self._own.row_states(rows)

    def choose(self, logits: Logits, draws: SamplingBatch) -> npt.NDArray[np.int32]:
        return self._own.choose(logits, draws)

    def pack_adapter(self, adapter: LoraAdapter) -> PackedAdapter:
        return RankedAdapter(self._own.pack_adapter(adapter), adapter)

    def set_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        assert adapter is None or isinstance(adapter, RankedAdapter)
        self._send(pack_adapter(slot, adapter.whole if adapter is not None else None))
        self._own.set_adapter(slot, adapter.own if adapter is not None else None)

    def stop(self) -> None:
        """End the other ranks."""
        self._plans.send(self._codec.encode(Stop()))

    def _send(self, command: RankCommand) -> None:
        try:
            self._plans.send(self._codec.encode(command))
        except Exception as error:
            self._fail(error)


def run_step(runner: SpecRunner, plan: StepPlan, num_stages: int) -> Logits:
    """Execute this rank's part of a step, in the same micro-batches as all ranks."""
    *others, last = micro_batches(plan, num_stages)
    for each in others:
        runner.step(each)
    return runner.step(last)


def follow(runner: SpecRunner, plans: PlanReceiver, num_stages: int) -> None:
    """Execute the commands of rank 0 until it stops this rank. Raises the errors of the runner and of `plans`."""
    codec = PlanCodec(PLAN_PARTS)
    while True:
        command: Any = codec.decode(plans.receive())
        match command:
            case RunStep():
                run_step(runner, codec.unpack_plan(command), num_stages)
            case SetAdapter(slot):
                adapter = unpack_adapter(command)
                runner.set_adapter(slot, None if adapter is None else runner.pack_adapter(adapter))
            case AllocateCache(num_blocks, block_size, num_host_blocks, max_num_seqs):
                runner.allocate_cache(
                    CacheLayout(num_blocks, block_size, num_host_blocks, max_num_seqs=max_num_seqs)
                )
            case Stop():
                return
