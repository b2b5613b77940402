"""CUDA graphs of decode steps: a whole step is one launch, whatever its number of kernels.

Steps are captured for some batch sizes, with and without LoRA adapters if the engine has them. Other batches are padded
with tokens that attend to themselves in the cache's padding block. A graph reads its inputs from static tensors, which
are filled before each replay.
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
from neso.engine.lora.adapter import LoraPlan
from neso.engine.runners.torch.step_inputs import (
    AdapterRows,
    StepInputs,
    adapter_tiles,
    max_adapter_tiles,
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
        lora_slots: int = 0,
    ) -> None:
        self._forward = forward
        self._block_size, self._padding_block = block_size, padding_block
        self._device = device
        self._sinks = sinks
        self._lora_slots = lora_slots
        self._inputs = self._static_inputs(BATCH_SIZES[-1], max_blocks)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._logits: Tensor | None = None
        started = time.perf_counter()
        # By batch size, and whether the batch has adapters.
        self._graphs = {
            (size, adapters): self._capture(self._first(size, adapters))
            for size in reversed(BATCH_SIZES)
            for adapters in ((True, False) if lora_slots else (False,))
        }
        if device.type == "cuda":
            logger.info("captured %d CUDA graphs in %.1f s", len(self._graphs), time.perf_counter() - started)

    @staticmethod
    def fits(plan: StepPlan) -> bool:
        """Whether the plan is a plain decode: one new token per sequence, all logits in order.

        It may have adapters, and the rotary positions after images may differ from the positions in the sequences.
        """
        return (
            plan.parts.keys() <= {RotaryPlan, LoraPlan}
            and plan.num_sequences == plan.num_tokens <= BATCH_SIZES[-1]
            and rotary_positions(plan, plan.num_computed).ndim == 1
            and wants_all_rows(plan)
        )

    def run(self, plan: StepPlan, chosen: Tensor | None = None) -> Tensor:
        """Return the logits float32[R, vocab_size] of a plan that `fits`, valid until the next run."""
        size = BATCH_SIZES[bisect_left(BATCH_SIZES, plan.num_sequences)]
        self._fill(plan, size, chosen)
        self._graphs[size, plan.part(LoraPlan) is not None]()
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
        adapters = None
        if self._lora_slots:
            tiles = (max_adapter_tiles(size, self._lora_slots), AdapterRows.FEW)
            adapters = AdapterRows(
                *(torch.full(shape, -1, dtype=torch.int32, device=self._device) for shape in ((size,), tiles))
            )
        return replace(inputs, **vectors, block_tables=inputs.block_tables.clone(), adapters=adapters)

    def _first(self, size: int, with_adapters: bool) -> StepInputs:
        """Return views of the first rows of the inputs."""
        all_inputs = self._inputs
        adapters = None
        if with_adapters:
            assert all_inputs.adapters is not None
            num_tiles = max_adapter_tiles(size, self._lora_slots)
            adapters = AdapterRows(all_inputs.adapters.slots[:size], all_inputs.adapters.tiles[:num_tiles])
        return replace(
            all_inputs,
            token_ids=all_inputs.token_ids[:size],
            positions=all_inputs.positions[:size],
            slots=all_inputs.slots[:size],
            query_start=all_inputs.query_start[: size + 1],
            num_computed=all_inputs.num_computed[:size],
            block_tables=all_inputs.block_tables[:size],
            decodes=all_inputs.decodes[:size],
            adapters=adapters,
            output_adapters=adapters,
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
        arrays = [np.stack([tokens, positions, slots, computed]), plan.block_tables]
        inputs, lora = self._inputs, plan.part(LoraPlan)
        if lora is not None:
            tiles = np.full((max_adapter_tiles(size, self._lora_slots), AdapterRows.FEW), -1, np.int32)
            found = adapter_tiles(lora.slots, AdapterRows.FEW)
            tiles[: len(found)] = found
            arrays += [lora.slots, tiles]
        vectors = send_together(arrays, self._device)
        if inputs.adapters is not None and lora is not None:
            inputs.adapters.slots[:used].copy_(vectors[2])
            inputs.adapters.tiles[: len(tiles)].copy_(vectors[3])
        for target, source in zip(
            (inputs.positions, inputs.slots, inputs.num_computed), vectors[0][1:], strict=True
        ):
            target[:size].copy_(source)
        inputs.token_ids[:size].copy_(resolve_tokens(plan, vectors[0][0], chosen))
        inputs.block_tables[:used, : plan.block_tables.shape[1]].copy_(vectors[1])
        inputs.block_tables[used:size, 0] = self._padding_block

    def _capture(self, inputs: StepInputs) -> Callable[[], None]:
        """Return the replay of a step; without a GPU, the step itself."""
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
