"""Whole matrices of quantized blocks: into a `QuantizedMatrix`, or dequantized."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from neso.engine.weights.gguf.block_formats import BLOCK_FORMATS, GROUP, UInt8Array
from neso.engine.weights.gguf.tensor_types import TensorType
from neso.engine.weights.quantized_matrix import QuantizedMatrix

# So many values at a time stay in the cache between the steps of a conversion.
_CHUNK_VALUES = 1 << 18


def quantized_matrix(kind: TensorType, rows: UInt8Array) -> QuantizedMatrix:
    """Groups of 32 inputs. `rows`: the blocks of each output, uint8[N, bytes of a row].

    Exact for all types but Q6_K, see there.
    """
    form = BLOCK_FORMATS[kind.name]
    blocks = rows.reshape(-1, kind.block_bytes)
    outputs, inputs = len(rows), rows.shape[1] // kind.block_bytes * kind.block_size
    codes = np.empty((len(blocks), kind.block_size), np.uint8)
    scales = np.empty((len(blocks), kind.block_size // GROUP), np.float32)
    offsets = np.empty_like(scales) if kind.name == "Q4_K" else None
    for part in _chunks(len(blocks), kind.block_size):
        groups = form.groups(blocks[part])
        codes[part], scales[part] = groups.codes, groups.scales
        if offsets is not None:
            offsets[part] = groups.offsets
    return QuantizedMatrix(
        codes=codes.reshape(outputs, inputs),
        scales=scales.reshape(outputs, inputs // GROUP),
        offsets=None if offsets is None else offsets.reshape(outputs, inputs // GROUP),
        bits=form.bits,
        group_size=GROUP,
    )


def dequantize(kind: TensorType, rows: UInt8Array, target: npt.NDArray[np.float32]) -> None:
    """The exact values of `rows`, uint8[..., bytes of a row], into float32[..., inputs]."""
    form = BLOCK_FORMATS[kind.name]
    blocks = rows.reshape(-1, kind.block_bytes)
    if not target.flags.c_contiguous:
        whole = np.empty(target.shape, np.float32)
        dequantize(kind, rows, whole)
        target[...] = whole
        return
    values = target.reshape(-1, kind.block_size)
    for part in _chunks(len(blocks), kind.block_size):
        values[part] = form.exact(blocks[part])


def _chunks(num_blocks: int, block_size: int) -> Iterator[slice]:
    step = max(1, _CHUNK_VALUES // block_size)
    return (slice(start, start + step) for start in range(0, num_blocks, step))
