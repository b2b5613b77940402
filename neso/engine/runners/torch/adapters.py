"""LoRA adapters on the device (arXiv 2106.09685), applied to the rows of each adapter in a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neso.engine.lora.adapter import LoraAdapter, Target


@dataclass(frozen=True, slots=True)
class Change:
    """Low-rank update of one matrix: a [rank, inputs], b [outputs, rank]."""

    a: Tensor
    b: Tensor
    scale: float

    def to(self, device: torch.device) -> Change:
        return Change(self.a.to(device), self.b.to(device), self.scale)


@dataclass(frozen=True, slots=True)
class TorchAdapter:
    """Low-rank updates by layer and target."""

    layers: list[dict[Target, Change]]

    @classmethod
    def convert(cls, adapter: LoraAdapter, dtype: torch.dtype) -> TorchAdapter:
        """Convert an adapter to `dtype`, on the host."""

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

    def to(self, device: torch.device) -> TorchAdapter:
        return TorchAdapter([{t: c.to(device) for t, c in layer.items()} for layer in self.layers])


class AdapterSlots:
    """Adapters on the device by slot. `widths`: outputs of each target's matrix."""

    def __init__(self, widths: dict[Target, int], device: torch.device) -> None:
        self._widths, self._device = widths, device
        self._adapters: dict[int, TorchAdapter] = {}

    def set(self, slot: int, adapter: TorchAdapter | None) -> None:
        self._adapters.pop(slot, None)
        if adapter is not None:
            self._adapters[slot] = adapter.to(self._device)

    def adapt(
        self, layer: int, targets: tuple[Target, ...], rows: dict[int, Tensor], x: Tensor, y: Tensor
    ) -> None:
        """Add scale * (x A^T) B^T to y, for x[T, inputs] and y[T, outputs], the concatenated outputs of the targets."""
        for slot, slot_rows in rows.items():
            changes = self._adapters[slot].layers[layer]
            if not any(target in changes for target in targets):
                continue
            inputs, start = x.index_select(0, slot_rows), 0
            for target in targets:
                end = start + self._widths[target]
                if target in changes:
                    change = changes[target]
                    delta = (inputs @ change.a.T * change.scale) @ change.b.T
                    y[:, start:end].index_add_(0, slot_rows, delta)
                start = end
