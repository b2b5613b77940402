"""LoRA adapters on the device (arXiv 2106.09685): stacked matrices of all slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neso.engine.lora.adapter import PRODUCTS, LoraAdapter, Target, targets_of
from neso.engine.specs.decoder_spec import DecoderSpec, layer_shapes

EXPAND_COLUMNS = 128
"""Maximum number of outputs in a block of the product with B."""


@dataclass(frozen=True, slots=True)
class Change:
    """Low-rank update of one matrix: a [rank, inputs], b [outputs, rank]."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class TorchAdapter:
    """Low-rank updates by layer and target, on the host."""

    layers: list[dict[Target, Change]]

    @classmethod
    def convert(cls, adapter: LoraAdapter, dtype: torch.dtype) -> TorchAdapter:
        """Convert an adapter to `dtype`."""

        def tensor(values: npt.NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values.astype(np.float32)).to(dtype)

        return cls(
            [
                {target: Change(tensor(c.a), tensor(c.b), c.scale) for target, c in layer.items()}
                for layer in adapter.layers
            ]
        )

    @property
    def num_bytes(self) -> int:
        return sum(c.a.nbytes + c.b.nbytes for layer in self.layers for c in layer.values())


@dataclass(frozen=True, slots=True)
class AdapterStack:
    """The adapters of all slots for one product of a layer, whose N targets have the same input.

    - a[slots, N, max_rank, inputs]; b[slots, outputs, max_rank] with the concatenated outputs of the targets
    - ranks int32[slots, N], scales float32[slots, N]: of the targets of a slot; rank 0: the target is not adapted.
      The rows of A and columns of B from the rank on are undefined.
    - widths: outputs of each target
    - blocks int32[M, 3]: (target, first output, end) of blocks of at most `EXPAND_COLUMNS` outputs of a target
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    scales: Tensor
    widths: tuple[int, ...]
    blocks: Tensor

    @classmethod
    def allocate(
        cls,
        slots: int,
        max_rank: int,
        inputs: int,
        widths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> AdapterStack:
        """Allocate a stack without adapters. `max_rank` is rounded up to 16, 32 or a multiple of 64."""
        rank = next((size for size in (16, 32) if max_rank <= size), -(-max_rank // 64) * 64)
        ends = np.cumsum(widths)
        blocks = [
            (target, first, min(first + EXPAND_COLUMNS, end))
            for target, (width, end) in enumerate(zip(widths, ends.tolist(), strict=True))
            for first in range(end - width, end, EXPAND_COLUMNS)
        ]
        count = len(widths)
        return cls(
            torch.zeros(slots, count, rank, inputs, dtype=dtype, device=device),
            torch.zeros(slots, int(ends[-1]), rank, dtype=dtype, device=device),
            torch.zeros(slots, count, dtype=torch.int32, device=device),
            torch.zeros(slots, count, device=device),
            tuple(widths),
            torch.tensor(blocks, dtype=torch.int32, device=device),
        )

    def set(self, slot: int, changes: Sequence[Change | None]) -> None:
        """Set the update of each target; None: the target is not adapted."""
        first = 0
        for target, (change, width) in enumerate(zip(changes, self.widths, strict=True)):
            if change is not None:
                rank = len(change.a)
                self.a[slot, target, :rank].copy_(change.a)
                self.b[slot, first : first + width, :rank].copy_(change.b)
            first += width
        used = [(0, 0.0) if change is None else (len(change.a), change.scale) for change in changes]
        self.ranks[slot].copy_(torch.tensor([rank for rank, _ in used], dtype=torch.int32))
        self.scales[slot].copy_(torch.tensor([scale for _, scale in used]))


class AdapterSlots:
    """Device memory for `slots` adapters with ranks of at most `max_rank`. No slots: adapters are not supported.

    `layers`: the stacks of each layer by targets.
    """

    def __init__(
        self, spec: DecoderSpec, slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots, self.max_rank = slots, max_rank
        self.layers: list[dict[tuple[Target, ...], AdapterStack]] = []
        for layer in range(spec.num_layers if slots else 0):
            shapes, adaptable = layer_shapes(spec, layer), targets_of(spec, layer)
            stacks = {}
            for product in PRODUCTS:
                targets = tuple(target for target in product if target in adaptable)
                if targets:
                    widths = [shapes[target][0] for target in targets]
                    inputs = shapes[targets[0]][1]
                    stacks[targets] = AdapterStack.allocate(slots, max_rank, inputs, widths, dtype, device)
            self.layers.append(stacks)

    @property
    def num_bytes(self) -> int:
        """Size of the matrices of all slots."""
        return sum(stack.a.nbytes + stack.b.nbytes for layer in self.layers for stack in layer.values())

    def set(self, slot: int, adapter: TorchAdapter | None) -> None:
        """Set or remove the adapter of a slot. Raises `ValueError` if there is no such slot, or for a larger rank."""
        if slot >= self.slots:
            raise ValueError(f"adapter slot {slot}: the runner was loaded for {self.slots} adapters")
        changes = [{}] * len(self.layers) if adapter is None else adapter.layers
        rank = max((len(c.a) for layer in changes for c in layer.values()), default=0)
        if rank > self.max_rank:
            raise ValueError(f"adapter rank {rank}: the runner was loaded for ranks up to {self.max_rank}")
        for stacks, layer in zip(self.layers, changes, strict=True):
            for targets, stack in stacks.items():
                stack.set(slot, [layer.get(target) for target in targets])
