"""The paged KV cache of the torch runner."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neso.engine.host_resources import available_memory
from neso.engine.runners.base import CacheLayout
from neso.engine.runners.shared_cache import CacheShape, SharedCache

_PIECE_BYTES = 64 << 20
"""Number of bytes that are gathered on the device for one copy."""
_PINNED_BYTES = 256 << 20
"""Size of an allocation of pinned memory. PyTorch rounds each up to a power of two: 40 GiB at once would take 64."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Number and width of the key and value heads of one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def values_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """keys[num_blocks, block_size, kv_heads, key_dim] and values likewise, in the dtype of the activations."""

    keys: Tensor
    values: Tensor


class KVCache:
    """The blocks of all layers, plus one padding block to which padded tokens write."""

    def __init__(
        self, shapes: list[HeadShape], layout: CacheLayout, dtype: torch.dtype, device: torch.device
    ):
        self.layout = layout
        self.padding_block = layout.num_blocks
        self.layers = [self._layer(shape, dtype, device) for shape in shapes]
        self._host = HostBlocks(self.layers, layout.num_host_blocks)
        self.shared = SharedBlocks(self.layers, layout.num_blocks) if layout.shared else None

    def _layer(self, shape: HeadShape, dtype: torch.dtype, device: torch.device) -> LayerCache:
        sizes = (self.layout.num_blocks + 1, self.layout.block_size, shape.kv_heads)
        # Zero-initialized: unwritten slots may be loaded and multiplied by 0, which would not mask a NaN.
        return LayerCache(
            torch.zeros(*sizes, shape.key_dim, dtype=dtype, device=device),
            torch.zeros(*sizes, shape.value_dim, dtype=dtype, device=device),
        )

    def transfer(self, transfers: npt.NDArray[np.int32]) -> None:
        """Copy blocks to the host and back asynchronously; see `StepPlan.block_transfers`."""
        for store, block, host_block in transfers.tolist():
            (self._host.store if store else self._host.load)(block, host_block)

    def copy_blocks(self, copies: Tensor) -> None:
        """Copy blocks in all layers; int32[C, 2] of (source, target). All sources are read before any write."""
        sources, targets = copies[:, 0].long(), copies[:, 1].long()
        for layer in self.layers:
            layer.keys[targets] = layer.keys[sources]
            layer.values[targets] = layer.values[sources]

    def copy_slots(self, sources: Tensor, targets: Tensor) -> None:
        """Copy single tokens in all layers, int32[C] slots each. All sources are read before any write."""
        for layer in self.layers:
            for part in (layer.keys.flatten(0, 1), layer.values.flatten(0, 1)):
                part[targets.long()] = part[sources.long()]


class HostBlocks:
    """Blocks in host memory; one row holds a block of all layers."""

    def __init__(self, layers: list[LayerCache], num_blocks: int) -> None:
        self._parts = [part for layer in layers for part in (layer.keys, layer.values)]
        self._sizes = [part[0].numel() for part in self._parts]
        first, width = self._parts[0], sum(self._sizes)
        rows_at_once = max(1, _PINNED_BYTES // (width * first.itemsize))
        # Pinned memory, so that copies overlap with computation.
        pinned = first.device.type == "cuda"
        self._rows = [
            row
            for start in range(0, num_blocks, rows_at_once)
            for row in torch.empty(
                min(rows_at_once, num_blocks - start), width, dtype=first.dtype, pin_memory=pinned
            )
        ]

    def store(self, block: int, host_block: int) -> None:
        row = torch.cat([part[block].flatten() for part in self._parts])
        self._rows[host_block].copy_(row, non_blocking=True)

    def load(self, block: int, host_block: int) -> None:
        row = self._rows[host_block].to(self._parts[0].device, non_blocking=True)
        for part, values in zip(self._parts, row.split(self._sizes), strict=True):
            part[block].copy_(values.view_as(part[block]))


class SharedBlocks:
    """Copies of blocks in host memory that other processes can map. A block has the same number in both.

    `memory` is allocated by the system when it is written, so it takes the size of the blocks that were transferred.
    All layers must have the same shape. Raises `OSError` if a copy of the whole cache would not fit.
    """

    def __init__(self, layers: list[LayerCache], num_blocks: int) -> None:
        self._parts = [part for layer in layers for part in (layer.keys, layer.values)]
        first = self._parts[0]
        shape = CacheShape(len(self._parts), num_blocks, first[0].numel() * first.itemsize)
        available = available_memory()
        if shape.cache_bytes > available:
            raise OSError(
                errno.ENOMEM,
                f"copies of all blocks take {shape.cache_bytes} bytes of host memory, {available} are available",
            )
        self.memory = SharedCache.create(shape)
        self._values = torch.from_numpy(self.memory.blocks).view(first.dtype)
        self._max_blocks = max(1, _PIECE_BYTES // shape.block_bytes)

    @torch.inference_mode()
    def store(self, blocks: list[int]) -> None:
        """Copy blocks from the device, after the steps that have been launched."""
        for piece, index in self._pieces(blocks):
            self._values[:, piece] = torch.stack([part[index].flatten(1) for part in self._parts]).cpu()

    @torch.inference_mode()
    def load(self, blocks: list[int]) -> None:
        """Copy blocks to the device, before the steps that will be launched."""
        for piece, index in self._pieces(blocks):
            values = self._values[:, piece].to(index.device)
            for part, rows in zip(self._parts, values, strict=True):
                part[index] = rows.view(-1, *part.shape[1:])

    def _pieces(self, blocks: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the numbers of at most `_PIECE_BYTES` bytes of blocks, in host memory and on the device."""
        for piece in torch.tensor(blocks, dtype=torch.int64).split(self._max_blocks):
            yield piece, piece.to(self._parts[0].device)


def bytes_per_block(shapes: list[HeadShape], block_size: int, dtype: torch.dtype) -> int:
    return sum(shape.values_per_token for shape in shapes) * block_size * dtype.itemsize
