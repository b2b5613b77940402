"""Conversion of ggml's quantized blocks to `QuantizedMatrix`, and exact dequantization.

Layouts follow ggml-common.h, where `d` is the scale of a block. Functions named after a type take M blocks, uint8[M,
bytes per block].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.weights.gguf.file import TensorType
from neso.engine.weights.quantized import QuantizedMatrix

Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

GROUP = 32


@dataclass(frozen=True, slots=True)
class Groups:
    """Fields of a `QuantizedMatrix`: codes uint8[M, block], scales and offsets float32[M, block / 32]."""

    codes: UInt8Array
    scales: Float32Array
    offsets: Float32Array | None = None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`groups` converts blocks to codes of `bits`, `exact` to the exact values float32[M, block]."""

    bits: int
    groups: Callable[[UInt8Array], Groups]
    exact: Callable[[UInt8Array], Float32Array]


def _q8_0(blocks: UInt8Array) -> Groups:
    """Parse blocks of d float16, then 32 signed codes."""
    return Groups(blocks[:, 2:] ^ np.uint8(0x80), _float16(blocks[:, :2]))


def _q4_0(blocks: UInt8Array) -> Groups:
    """Parse blocks of d float16, then 16 bytes: the first 16 codes in the low nibbles, the rest in the high ones."""
    return Groups(_nibbles(blocks[:, 2:]), _float16(blocks[:, :2]))


def _q4_k(blocks: UInt8Array) -> Groups:
    """Parse blocks of d and dmin float16, 8 scales and minima of 6 bits in 12 bytes, then 4 x 32 bytes of nibbles."""
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    # Four plain 6-bit values, then four whose upper two bits are the unused upper bits of the first four.
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 256)
    return Groups(codes, _float16(blocks[:, 0:2]) * scales, -(_float16(blocks[:, 2:4]) * minima))


def _q6_k(blocks: UInt8Array) -> Groups:
    """Requantize to 8 bits: Q6_K has one scale per 16 codes of 6 bits, `QuantizedMatrix` one per 32 or more.

    The two scales of a group of 32 are d times signed bytes. The new scale is a quarter of the larger one, so the half
    with that scale stays exact (4 x code), and so does the other half if the scales are equal. Otherwise the error is
    at most half a step, an eighth of the larger scale; if the scales have opposite signs, code 128 cannot be
    represented, and 127 is off by a whole step.
    """
    codes, scales, d = _q6_k_parts(blocks)
    pairs = scales.reshape(-1, 8, 2)
    largest = np.where(np.abs(pairs[..., 0]) >= np.abs(pairs[..., 1]), pairs[..., 0], pairs[..., 1])
    nonzero = np.where(largest == 0, np.float32(1), largest)
    ratios = (4 * pairs / nonzero[..., None]).reshape(-1, 16, 1)
    recoded = codes.reshape(-1, 16, 16) * ratios
    recoded += 128 - 32 * ratios
    np.rint(recoded, out=recoded)
    np.minimum(recoded, 255, out=recoded)
    return Groups(recoded.reshape(-1, 256).astype(np.uint8), d * largest * np.float32(0.25))


def _q6_k_exact(blocks: UInt8Array) -> Float32Array:
    codes, scales, d = _q6_k_parts(blocks)
    values = codes.reshape(-1, 16, 16).astype(np.float32) - 32
    values *= (d * scales)[..., None]
    return values.reshape(-1, 256)


def _q6_k_parts(blocks: UInt8Array) -> tuple[UInt8Array, Float32Array, Float32Array]:
    """Return codes uint8[M, 256] from 0 to 63 (meaning -32 to 31), scales float32[M, 16], d float32[M, 1].

    128 bytes of lower 4 bits, 64 bytes of upper 2 bits, 16 scales (int8), d float16. Each half of the block has its 128
    codes in four runs of 32: two in the low nibbles, two in the high ones.
    """
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    codes = np.empty((len(blocks), 2, 4, 32), np.uint8)
    np.bitwise_and(low, 15, out=codes[:, :, :2])
    np.right_shift(low, 4, out=codes[:, :, 2:])
    codes |= (high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3) << 4
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return codes.reshape(-1, 256), scales, _float16(blocks[:, 208:210])


def _nibbles(packed: UInt8Array) -> UInt8Array:
    """Return low nibbles, then high nibbles: uint8[M, n] to uint8[M, 2n]."""
    count = packed.shape[1]
    codes = np.empty((len(packed), 2 * count), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :count])
    np.right_shift(packed, 4, out=codes[:, count:])
    return codes


def _float16(pairs: UInt8Array) -> Float32Array:
    """Reinterpret two bytes as float16: uint8[M, 2] to float32[M, 1]."""
    return np.ascontiguousarray(pairs).view(np.float16).astype(np.float32)


def _dequantized(groups: Groups, bits: int) -> Float32Array:
    codes = groups.codes.reshape(len(groups.codes), -1, GROUP).astype(np.float32)
    if groups.offsets is None:
        codes -= 2 ** (bits - 1)
    codes *= groups.scales[..., None]
    if groups.offsets is not None:
        codes += groups.offsets[..., None]
    return codes.reshape(len(codes), -1)


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "Q8_0": BlockFormat(8, _q8_0, lambda blocks: _dequantized(_q8_0(blocks), 8)),
    "Q4_0": BlockFormat(4, _q4_0, lambda blocks: _dequantized(_q4_0(blocks), 4)),
    "Q4_K": BlockFormat(4, _q4_k, lambda blocks: _dequantized(_q4_k(blocks), 4)),
    "Q6_K": BlockFormat(8, _q6_k, _q6_k_exact),
}


# Number of values converted at a time, so that intermediates stay in the CPU cache.
_CHUNK_VALUES = 1 << 18


def quantized_matrix(kind: TensorType, rows: UInt8Array) -> QuantizedMatrix:
    """Convert the blocks of N outputs, uint8[N, bytes per row], to groups of 32 inputs.

    Exact except for Q6_K, see `_q6_k`.
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
    """Write the exact values of `rows` uint8[..., bytes per row] to `target` float32[..., inputs]."""
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
