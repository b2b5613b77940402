"""CUDA graphs of decode steps: a whole step is one launch, whatever its number of kernels.

Steps are captured for some batch sizes; other batches are padded with tokens that attend to themselves in the cache's
padding block. A graph reads its inputs from static tensors, which are filled before each replay.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from neso.engine.addons.image_positions import RotaryPlan, rotary_positions
from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.torch.step_inputs import (
    StepInputs,
    resolve_tokens,
    send_together,
    step_inputs,
    wants_all_rows,
)

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, *range(8, 257, 8))

Forward = Callable[[StepInputs], Tensor]


class DecodeGraphs:
    """Captures all batch sizes when it is made; the graphs share one buffer of logits and one of intermediates.

    The largest is captured first: the others fit into its memory.
    """

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
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._logits: Tensor | None = None
        started = time.perf_counter()
        self._graphs = {size: self._capture(size) for size in reversed(BATCH_SIZES)}
        if device.type == "cuda":
            logger.info("captured %d CUDA graphs in %.1f s", len(BATCH_SIZES), time.perf_counter() - started)

    @staticmethod
    def fits(plan: StepPlan) -> bool:
        """Whether the plan is a plain decode: one new token per sequence, all logits in order, no add-ons.

        Only the rotary positions after images may differ from the positions in the sequences.
        """
        return (
            plan.parts.keys() <= {RotaryPlan}
            and plan.num_sequences == plan.num_tokens <= BATCH_SIZES[-1]
            and rotary_positions(plan, plan.num_computed).ndim == 1
            and wants_all_rows(plan)
        )

    def run(self, plan: StepPlan, chosen: Tensor | None = None) -> Tensor:
        """Return the logits float32[R, vocab_size] of a plan that `fits`, valid until the next run."""
        size = BATCH_SIZES[bisect_left(BATCH_SIZES, plan.num_sequences)]
        self._fill(plan, size, chosen)
        self._graphs[size]()
        assert self._logits is not None
        return self._logits[: plan.num_sequences]

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
        # With one new token per sequence, its position in the sequence is num_computed.
        positions = np.concatenate([rotary_positions(plan, plan.num_computed), padding])
        vectors = send_together(
            [np.stack([tokens, positions, slots, computed]), plan.block_tables], self._device
        )
        inputs = self._inputs
        for target, source in zip(
            (inputs.positions, inputs.slots, inputs.num_computed), vectors[0][1:], strict=True
        ):
            target[:size].copy_(source)
        inputs.token_ids[:size].copy_(resolve_tokens(plan, vectors[0][0], chosen))
        inputs.block_tables[:used, : plan.block_tables.shape[1]].copy_(vectors[1])
        inputs.block_tables[used:size, 0] = self._padding_block

    def _capture(self, size: int) -> Callable[[], None]:
        """Return the replay of a step of `size` sequences; without a GPU, the step itself."""
        inputs = self._first(size)
        if self._device.type != "cuda":
            return lambda: self._run_step(inputs)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            # Warm up: kernels compile and libraries allocate on first use, which cannot be captured.
            self._run_step(inputs)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._run_step(inputs)
        return graph.replay

    def _run_step(self, inputs: StepInputs) -> None:
        """Compute the logits into the first rows of the buffer. Ranks other than 0 have no rows."""
        logits = self._forward(inputs)
        if self._logits is None:
            self._logits = logits.new_empty(BATCH_SIZES[-1] if len(logits) else 0, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)
