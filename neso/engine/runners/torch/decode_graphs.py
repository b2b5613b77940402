"""CUDA graphs of decode steps: a whole step is one launch, whatever its number of kernels.

Steps are captured for some batch sizes, with and without LoRA adapters if the engine has them. Other batches are padded
with tokens that attend to themselves in the cache's padding block. A graph reads its inputs from static tensors, which
are filled before each replay. Copies and replays are on one stream, so a copy waits for the replay before it.
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

Forward = Callable[[StepInputs], Tensor]


def batch_sizes(largest: int) -> list[int]:
    """Return the captured batch sizes, ascending: `largest` and smaller ones.

    They are further apart the larger they are, because each graph takes memory, and time at start.
    """
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 512, 32), *range(512, largest, 64))
    return [*(size for size in sizes if size < largest), largest]


class DecodeGraphs:
    """Captures all batch sizes when it is made; the graphs share one buffer of logits and one of intermediates.

    The largest is captured first: the others fit into its memory. With LoRA, each size is captured twice, because a
    step without adapters would spend time on the launches of their kernels.
    """

    def __init__(
        self,
        forward: Forward,
        block_size: int,
        padding_block: int,
        max_blocks: int,
        max_batch: int,
        device: torch.device,
        sinks: int = 0,
        lora_slots: int = 0,
    ) -> None:
        self._forward = forward
        self._block_size, self._padding_block = block_size, padding_block
        self._device = device
        self._sinks = sinks
        self._lora_slots = lora_slots
        self._sizes = batch_sizes(max_batch)
        # int32[4, max_batch]: rows of token_ids, positions, slots and num_computed. A row starts at a multiple of 16
        # bytes, see `send_together`.
        self._vectors = torch.zeros(4, -(-max_batch // 4) * 4, dtype=torch.int32, device=device)
        self._inputs = self._static_inputs(max_batch, max_blocks)
        self._logits: Tensor | None = None
        if device.type == "cuda":
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        started = time.perf_counter()
        # By batch size, and whether the batch has adapters.
        self._graphs = {
            (size, adapters): self._capture(self._first(size, adapters))
            for size in reversed(self._sizes)
            for adapters in ((True, False) if lora_slots else (False,))
        }
        if device.type == "cuda":
            seconds = time.perf_counter() - started
            logger.info(
                "captured %d CUDA graphs of up to %d sequences in %.1f s",
                len(self._graphs),
                max_batch,
                seconds,
            )

    def fits(self, plan: StepPlan) -> bool:
        """Whether the plan is a plain decode: one new token per sequence, all logits in order.

        It may have adapters, and the rotary positions after images may differ from the positions in the sequences.
        """
        return (
            plan.parts.keys() <= {RotaryPlan, LoraPlan}
            and plan.num_sequences == plan.num_tokens <= self._sizes[-1]
            and rotary_positions(plan, plan.num_computed).ndim == 1
            and wants_all_rows(plan)
        )

    def run(self, plan: StepPlan, chosen: Tensor | None = None) -> Tensor:
        """Return the logits float32[R, vocab_size] of a plan that `fits`, valid until the next run."""
        size = self._sizes[bisect_left(self._sizes, plan.num_sequences)]
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
        self._vectors[2] = self._padding_block * self._block_size
        adapters = None
        if self._lora_slots:
            tiles = (max_adapter_tiles(size, self._lora_slots), AdapterRows.FEW)
            adapters = AdapterRows(
                *(torch.full(shape, -1, dtype=torch.int32, device=self._device) for shape in ((size,), tiles))
            )
        return replace(inputs, adapters=adapters)

    def _first(self, size: int, with_adapters: bool) -> StepInputs:
        """Return views of the first rows of the inputs."""
        all_inputs = self._inputs
        adapters = None
        if with_adapters:
            assert all_inputs.adapters is not None
            num_tiles = max_adapter_tiles(size, self._lora_slots)
            adapters = AdapterRows(all_inputs.adapters.slots[:size], all_inputs.adapters.tiles[:num_tiles])
        token_ids, positions, slots, num_computed = self._vectors[:, :size]
        return replace(
            all_inputs,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_start=all_inputs.query_start[: size + 1],
            num_computed=num_computed,
            block_tables=all_inputs.block_tables[:size],
            decodes=all_inputs.decodes[:size],
            adapters=adapters,
            output_adapters=adapters,
        )

    def _fill(self, plan: StepPlan, size: int, chosen: Tensor | None) -> None:
        """Copy a plan into the first rows, and padding into the rest up to `size`."""
        used, inputs, lora = plan.num_sequences, self._inputs, plan.part(LoraPlan)
        vectors = np.zeros((4, size), np.int32)
        # With one new token per sequence, its position in the sequence is num_computed.
        positions = rotary_positions(plan, plan.num_computed)
        vectors[:, :used] = plan.token_ids, positions, plan.slots(self._block_size), plan.num_computed
        vectors[2, used:] = self._padding_block * self._block_size
        arrays = [vectors, plan.block_tables]
        if lora is not None:
            tiles = np.full((max_adapter_tiles(size, self._lora_slots), AdapterRows.FEW), -1, np.int32)
            found = adapter_tiles(lora.slots, AdapterRows.FEW)
            tiles[: len(found)] = found
            arrays += [lora.slots, tiles]
        sent, block_tables, *adapters = send_together(arrays, self._device)
        self._vectors[:, :size].copy_(sent)
        tokens = sent[0]
        resolved = resolve_tokens(plan, tokens, chosen)
        if resolved is not tokens:
            self._vectors[0, :size].copy_(resolved)
        inputs.block_tables[:used, : plan.block_tables.shape[1]].copy_(block_tables)
        inputs.block_tables[used:size, 0].fill_(self._padding_block)
        if adapters:
            assert inputs.adapters is not None
            inputs.adapters.slots[:used].copy_(adapters[0])
            inputs.adapters.tiles[: len(adapters[1])].copy_(adapters[1])

    def _capture(self, inputs: StepInputs) -> Callable[[], None]:
        """Return the replay of a step; without a GPU, the step itself."""
        if self._device.type != "cuda":
            return lambda: self._run_step(inputs)
        # One stream for all, because graphs share memory, and calls of cuBLAS their workspace, only within a stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Warm up: kernels compile, and libraries and NCCL allocate on first use, which cannot be captured.
            self._run_step(inputs)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the GPU meanwhile, for example those of NCCL.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                self._run_step(inputs)
        except RuntimeError:
            logger.error(
                "the CUDA graph of %d sequences cannot be captured; max_cuda_graph_batch=0 runs steps without graphs",
                len(inputs.token_ids),
            )
            raise
        return graph.replay

    def _run_step(self, inputs: StepInputs) -> None:
        """Compute the logits into the first rows of the buffer. Ranks other than 0 have no rows."""
        logits = self._forward(inputs)
        if self._logits is None:
            self._logits = logits.new_empty(self._sizes[-1] if len(logits) else 0, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)
