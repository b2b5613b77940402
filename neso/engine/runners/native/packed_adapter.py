"""LoRA adapters in the layout of the C++ kernels (csrc/kernels/kernels.h: ShrinkTask, ExpandTask)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

import neso._native as _native
from neso.engine.lora.adapter import PRODUCTS, LoraAdapter, LowRank, Target
from neso.engine.runners.native.packing import PANEL, Arena

AdapterKind = Literal["f32", "bf16"]

_DTYPES: dict[AdapterKind, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
_BLOCK = 32
"""Inputs of the matrices A are padded to a multiple of this."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeAdapter:
    """A packed adapter; `num_bytes`: size of its weights."""

    native: _native.Adapter
    num_bytes: int

    @classmethod
    def pack(cls, adapter: LoraAdapter, kind: AdapterKind, widths: Mapping[Target, int]) -> NativeAdapter:
        """Pack an adapter. `widths`: outputs of each target's matrix."""
        packer = _Packer(kind)
        native = _native.Adapter(kind, len(adapter.layers))
        for layer, changes in enumerate(adapter.layers):
            for product, targets in enumerate(PRODUCTS):
                adapted = [target for target in targets if target in changes]
                if adapted:
                    a, scales = packer.pack_a([changes[target] for target in adapted])
                    native.add_product(layer, product, changes[adapted[0]].a.shape[1], a, scales)
                first_output = 0
                for target in targets:
                    if target in changes:
                        b = packer.pack_b(changes[target])
                        rank = _even(changes[target].rank)
                        native.add_part(layer, product, first_output, widths[target], rank, b)
                    first_output += widths.get(target, 0)
        return cls(native, packer.num_bytes)


class _Packer:
    """Packs the matrices A and B of low-rank updates into an arena."""

    def __init__(self, kind: AdapterKind) -> None:
        self.num_bytes = 0
        self._dtype = _DTYPES[kind]
        self._arena = Arena()

    def pack_a(self, changes: list[LowRank]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
        """Return the stacked matrices A, and the scale of each rank."""
        inputs = changes[0].a.shape[1]
        ranks = sum(_even(change.rank) for change in changes)
        blocks = -(-inputs // _BLOCK)
        stacked = np.zeros((ranks, blocks * _BLOCK), self._dtype)
        scales = np.zeros(ranks, np.float32)
        first = 0
        for change in changes:
            stacked[first : first + change.rank, :inputs] = change.a
            scales[first : first + change.rank] = change.scale
            first += _even(change.rank)
        if self._dtype != np.float32:
            stacked = stacked.reshape(ranks, blocks, 2, _BLOCK // 2).swapaxes(2, 3)
        return self._keep(stacked, -(-ranks // PANEL)), scales

    def pack_b(self, change: LowRank) -> npt.NDArray[np.uint8]:
        """Return the matrix B in panels of 16 outputs."""
        outputs, rank = len(change.b), _even(change.rank)
        panels = -(-outputs // PANEL)
        padded = np.zeros((panels * PANEL, rank), self._dtype)
        padded[:outputs, : change.rank] = change.b
        pair = 1 if self._dtype == np.float32 else 2
        return self._keep(padded.reshape(panels, PANEL, rank // pair, pair).swapaxes(1, 2), panels)

    def _keep(self, values: npt.NDArray[Any], panels: int) -> npt.NDArray[np.uint8]:
        target = self._arena.zeros(values.nbytes, panels)
        target.view(self._dtype)[...] = values.reshape(-1)
        self.num_bytes += values.nbytes
        return target


def _even(rank: int) -> int:
    """Round up to an even number: kernels multiply ranks in pairs, so odd ranks are padded with zeros."""
    return rank + rank % 2
