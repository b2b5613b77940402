"""CUDA graphs of decode steps: a whole step is one launch, whatever its number of kernels.

Steps are captured for some batch sizes; other batches are padded with tokens that attend to themselves in the cache's
padding block. A graph reads its inputs from static tensors, which are filled before each replay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.torch.step_inputs import (
    StepInputs,
    resolve_tokens,
    send_together,
    step_inputs,
    wants_all_rows,
)

BATCH_SIZES = (1, 2, 4, *range(8, 257, 8))

Forward = Callable[[StepInputs], Tensor]


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """Captures a batch size on first use; all graphs share the memory of intermediates."""

    def __init__(
        self,
        forward: Forward,
        block_size: int,
        padding_block: int,
        max_blocks: int,
        device: torch.device,
        sinks: int = 0,
    ) -> None:
        self._forward = forward
        self._block_size, self._padding_block = block_size, padding_block
        self._device = device
        self._sinks = sinks
        self._inputs = self._static_inputs(BATCH_SIZES[-1], max_blocks)
        self._graphs: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @staticmethod
    def fits(plan: StepPlan) -> bool:
        """Whether the plan is a plain decode: one new token per sequence, all logits in order, no add-ons."""
        return (
            not plan.parts
            and plan.num_sequences == plan.num_tokens <= BATCH_SIZES[-1]
            and wants_all_rows(plan)
        )

    def run(self, plan: StepPlan, chosen: Tensor | None = None) -> Tensor:
        """Return the logits float32[R, vocab_size] of a plan that `fits`, valid until the next run."""
        size = BATCH_SIZES[bisect_left(BATCH_SIZES, plan.num_sequences)]
        self._fill(plan, size, chosen)
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._capture(self._first(size))
        graph.replay()
        return graph.logits[: plan.num_sequences]

    def _static_inputs(self, size: int, max_blocks: int) -> StepInputs:
        """Create the inputs of the largest batch, filled with padding."""
        padding = StepPlan(
            step=0,
            sequence_ids=np.arange(size, dtype=np.int32),
            token_ids=np.zeros(size, np.int32),
            query_start=np.arange(size + 1, dtype=np.int32),
            num_computed=np.zeros(size, np.int32),
            block_tables=np.full((size, max_blocks), self._padding_block, np.int32),
            block_copies=np.empty((0, 2), np.int32),
            logits_rows=np.arange(size, dtype=np.int32),
        )
        inputs = step_inputs(padding, self._block_size, self._device, sinks=self._sinks)
        # Clone the tensors, because they are views of one buffer.
        vectors = {
            name: getattr(inputs, name).clone()
            for name in ("token_ids", "positions", "slots", "num_computed")
        }
        return replace(inputs, **vectors, block_tables=inputs.block_tables.clone())

    def _first(self, size: int) -> StepInputs:
        """Return views of the first rows of the inputs."""
        all_inputs = self._inputs
        return replace(
            all_inputs,
            token_ids=all_inputs.token_ids[:size],
            positions=all_inputs.positions[:size],
            slots=all_inputs.slots[:size],
            query_start=all_inputs.query_start[: size + 1],
            num_computed=all_inputs.num_computed[:size],
            block_tables=all_inputs.block_tables[:size],
            decodes=all_inputs.decodes[:size],
        )

    def _fill(self, plan: StepPlan, size: int, chosen: Tensor | None) -> None:
        """Copy a plan into the first rows, and padding into the rest up to `size`."""
        used, padding = plan.num_sequences, np.zeros(size - plan.num_sequences, np.int32)
        slots = np.concatenate(
            [plan.slots(self._block_size), padding + self._padding_block * self._block_size]
        )
        computed = np.concatenate([plan.num_computed, padding])
        tokens = np.concatenate([plan.token_ids, padding])
        # With one new token per sequence, its position is num_computed.
        vectors = send_together(
            [np.stack([tokens, computed, slots, computed]), plan.block_tables], self._device
        )
        inputs = self._inputs
        for target, source in zip(
            (inputs.positions, inputs.slots, inputs.num_computed), vectors[0][1:], strict=True
        ):
            target[:size].copy_(source)
        inputs.token_ids[:size].copy_(resolve_tokens(plan, vectors[0][0], chosen))
        inputs.block_tables[:used, : plan.block_tables.shape[1]].copy_(vectors[1])
        inputs.block_tables[used:size, 0] = self._padding_block

    def _capture(self, inputs: StepInputs) -> _Graph:
        if self._device.type != "cuda":
            return self._uncaptured(inputs)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # Warm up: kernels compile and libraries allocate on first use, which cannot be captured.
            self._forward(inputs)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._forward(inputs)
        return _Graph(graph.replay, logits)

    def _uncaptured(self, inputs: StepInputs) -> _Graph:
        """Emulate a graph, for tests without a GPU."""
        logits = self._forward(inputs)

        def replay() -> None:
            logits.copy_(self._forward(inputs))

        return _Graph(replay, logits)
