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
    """`groups` converts blocks to codes of `bits`, `exact` to the exact values float32[M, block].

    `has_offsets`: whether the groups have offsets.
    """

    bits: int
    groups: Callable[[UInt8Array], Groups]
    exact: Callable[[UInt8Array], Float32Array]
    has_offsets: bool = False


def _q8_0(blocks: UInt8Array) -> Groups:
    """Parse blocks of d float16, then 32 signed codes."""
    return Groups(blocks[:, 2:] ^ np.uint8(0x80), _float16(blocks[:, :2]))


def _q4_0(blocks: UInt8Array) -> Groups:
    """Parse blocks of d float16, then 16 bytes: the first 16 codes in the low nibbles, the rest in the high ones."""
    return Groups(_nibbles(blocks[:, 2:]), _float16(blocks[:, :2]))


def _q4_1(blocks: UInt8Array) -> Groups:
    """Parse blocks of d and minimum float16, then 16 bytes of nibbles as in Q4_0."""
    return Groups(_nibbles(blocks[:, 4:]), _float16(blocks[:, :2]), _float16(blocks[:, 2:4]))


def _q5_0(blocks: UInt8Array) -> Groups:
    """Parse blocks of d float16, 32 fifth bits, then 16 bytes of nibbles. Codes are moved from the center 16 to 128."""
    codes = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) * np.uint8(16)
    return Groups(codes + np.uint8(112), _float16(blocks[:, :2]))


def _q5_1(blocks: UInt8Array) -> Groups:
    """Parse blocks of d and minimum float16, 32 fifth bits, then 16 bytes of nibbles."""
    codes = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) * np.uint8(16)
    return Groups(codes, _float16(blocks[:, :2]), _float16(blocks[:, 2:4]))


def _q4_k(blocks: UInt8Array) -> Groups:
    """Parse blocks of d and dmin float16, 8 scales and minima of 6 bits in 12 bytes, then 4 x 32 bytes of nibbles."""
    codes = _nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 256)
    return Groups(codes, *_k_scales(blocks))


def _q5_k(blocks: UInt8Array) -> Groups:
    """Parse blocks of Q4_K with fifth bits before the nibbles: bit g of byte i is for code i of group g."""
    codes = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32)
    codes |= (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return Groups(codes.reshape(-1, 256), *_k_scales(blocks))


def _k_scales(blocks: UInt8Array) -> tuple[Float32Array, Float32Array]:
    """Return the scales and offsets float32[M, 8] of Q4_K and Q5_K."""
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    # Four plain 6-bit values, then four whose upper two bits are the unused upper bits of the first four.
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    return _float16(blocks[:, 0:2]) * scales, -(_float16(blocks[:, 2:4]) * minima)


_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)
_IQ4_CODES = (_IQ4_VALUES + 128).astype(np.uint8)
"""The 16 values of the non-linear 4-bit types, as codes of 8 bits."""


def _iq4_nl(blocks: UInt8Array) -> Groups:
    """Parse blocks of d float16, then 16 bytes of nibbles, which are indices of values."""
    return Groups(_IQ4_CODES[_nibbles(blocks[:, 2:])], _float16(blocks[:, :2]))


def _iq4_xs(blocks: UInt8Array) -> Groups:
    """Parse blocks of d float16, 8 scales of 6 bits (upper 2 in 2 bytes, lower 4 in 4), 8 x 16 bytes of nibbles."""
    codes = _IQ4_CODES[_nibbles(blocks[:, 8:].reshape(-1, 16))].reshape(-1, 256)
    upper = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    lower = blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15
    scales = (lower.reshape(-1, 8) | upper << 4).astype(np.float32) - 32
    return Groups(codes, _float16(blocks[:, :2]) * scales)


def _q2_k(blocks: UInt8Array) -> Groups:
    """Requantize to 8 bits: Q2_K has a scale and a minimum per 16 codes, `QuantizedMatrix` one per 32 or more.

    The 256 codes of a group are spread evenly from its lowest to its highest value, so the error is at most 1/510 of
    this range.
    """
    values = _q2_k_exact(blocks).reshape(-1, 8, GROUP)
    lowest = values.min(axis=2)
    scales = (values.max(axis=2) - lowest) / np.float32(255)
    codes = (values - lowest[..., None]) / np.where(scales == 0, np.float32(1), scales)[..., None]
    return Groups(np.rint(codes).astype(np.uint8).reshape(-1, 256), scales, lowest)


def _q2_k_exact(blocks: UInt8Array) -> Float32Array:
    """Parse blocks of 16 scales (low nibble) and minima (high nibble), 64 bytes of 2-bit codes, d and dmin float16."""
    codes = _two_bits(blocks[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    d, dmin = _float16(blocks[:, 80:82]), _float16(blocks[:, 82:84])
    codes *= (d * (blocks[:, :16] & 15))[..., None]
    codes -= (dmin * (blocks[:, :16] >> 4))[..., None]
    return codes.reshape(-1, 256)


def _q3_k(blocks: UInt8Array) -> Groups:
    """Requantize to 8 bits: Q3_K has one scale per 16 codes of 3 bits, `QuantizedMatrix` one per 32 or more.

    The new scale is a 32nd of the larger of the two scales of a group. The half with that scale stays exact; the error
    of the other half is at most half a step, a 64th of the larger scale, and a whole step for the highest value if the
    scales have opposite signs.
    """
    codes, scales, d = _q3_k_parts(blocks)
    return _paired(codes, scales, d, center=4, steps=32)


def _q3_k_exact(blocks: UInt8Array) -> Float32Array:
    return _scaled(*_q3_k_parts(blocks), center=4)


def _q3_k_parts(blocks: UInt8Array) -> tuple[UInt8Array, Float32Array, Float32Array]:
    """Return codes uint8[M, 256] from 0 to 7 (meaning -4 to 3), scales float32[M, 16], d float32[M, 1].

    32 bytes with the third bits (bit g of byte i for code i of group g), 64 bytes of 2-bit codes, 12 bytes with the
    16 scales of 6 bits, d float16.
    """
    codes = _two_bits(blocks[:, 32:96]).reshape(-1, 8, 32)
    codes |= (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 2
    lower = blocks[:, 96:104, None] >> np.array([0, 4], np.uint8) & 15
    upper = blocks[:, None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = lower.swapaxes(1, 2).reshape(-1, 16) | upper.reshape(-1, 16) << 4
    return codes.reshape(-1, 256), scales.astype(np.float32) - 32, _float16(blocks[:, 108:110])


def _q6_k(blocks: UInt8Array) -> Groups:
    """Requantize to 8 bits: Q6_K has one scale per 16 codes of 6 bits, `QuantizedMatrix` one per 32 or more.

    The new scale is a quarter of the larger of the two scales of a group, so the half with that scale stays exact
    (4 x code), and so does the other half if the scales are equal. Otherwise the error is at most half a step, an
    eighth of the larger scale, and a whole step for the highest value if the scales have opposite signs.
    """
    codes, scales, d = _q6_k_parts(blocks)
    return _paired(codes, scales, d, center=32, steps=4)


def _q6_k_exact(blocks: UInt8Array) -> Float32Array:
    return _scaled(*_q6_k_parts(blocks), center=32)


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


def _paired(codes: UInt8Array, scales: Float32Array, d: Float32Array, *, center: int, steps: int) -> Groups:
    """Requantize codes uint8[M, 256] with a scale per 16 to 8-bit codes with a scale per 32.

    A step of the new codes is 1 / `steps` of the larger scale of a pair.
    """
    pairs = scales.reshape(-1, 8, 2)
    largest = np.where(np.abs(pairs[..., 0]) >= np.abs(pairs[..., 1]), pairs[..., 0], pairs[..., 1])
    nonzero = np.where(largest == 0, np.float32(1), largest)
    ratios = (steps * pairs / nonzero[..., None]).reshape(-1, 16, 1)
    recoded = codes.reshape(-1, 16, 16) * ratios
    recoded += 128 - center * ratios
    np.rint(recoded, out=recoded)
    np.minimum(recoded, 255, out=recoded)
    return Groups(recoded.reshape(-1, 256).astype(np.uint8), d * largest * np.float32(1 / steps))


def _scaled(codes: UInt8Array, scales: Float32Array, d: Float32Array, *, center: int) -> Float32Array:
    """Return the exact values float32[M, 256] of codes with a scale per 16."""
    values = codes.reshape(-1, 16, 16).astype(np.float32) - center
    values *= (d * scales)[..., None]
    return values.reshape(-1, 256)


def _two_bits(packed: UInt8Array) -> UInt8Array:
    """Unpack the 2-bit codes of Q2_K and Q3_K: each half of a block has 32 bytes, with four codes of 32 in a row."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (packed.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(-1, 256)


def _bits(packed: UInt8Array) -> UInt8Array:
    """Return single bits, the lowest first: uint8[M, n] to uint8[M, 8n]."""
    bits: UInt8Array = np.unpackbits(packed, axis=1, bitorder="little")
    return bits


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


def _lossless(bits: int, groups: Callable[[UInt8Array], Groups], *, offsets: bool = False) -> BlockFormat:
    return BlockFormat(bits, groups, lambda blocks: _dequantized(groups(blocks), bits), offsets)


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "Q8_0": _lossless(8, _q8_0),
    "Q4_0": _lossless(4, _q4_0),
    "Q4_1": _lossless(4, _q4_1, offsets=True),
    "Q5_0": _lossless(8, _q5_0),
    "Q5_1": _lossless(8, _q5_1, offsets=True),
    "Q2_K": BlockFormat(8, _q2_k, _q2_k_exact, has_offsets=True),
    "Q3_K": BlockFormat(8, _q3_k, _q3_k_exact),
    "Q4_K": _lossless(4, _q4_k, offsets=True),
    "Q5_K": _lossless(8, _q5_k, offsets=True),
    "Q6_K": BlockFormat(8, _q6_k, _q6_k_exact),
    "IQ4_NL": _lossless(8, _iq4_nl),
    "IQ4_XS": _lossless(8, _iq4_xs),
}


# Number of values converted at a time, so that intermediates stay in the CPU cache.
_CHUNK_VALUES = 1 << 18


def quantized_matrix(kind: TensorType, rows: UInt8Array) -> QuantizedMatrix:
    """Convert the blocks of N outputs, uint8[N, bytes per row], to groups of 32 inputs.

    Exact except for Q2_K, Q3_K and Q6_K, see their functions. Codes of 5 bits are stored in 8.
    """
    form = BLOCK_FORMATS[kind.name]
    blocks = rows.reshape(-1, kind.block_bytes)
    outputs, inputs = len(rows), rows.shape[1] // kind.block_bytes * kind.block_size
    codes = np.empty((len(blocks), kind.block_size), np.uint8)
    scales = np.empty((len(blocks), kind.block_size // GROUP), np.float32)
    offsets = np.empty_like(scales) if form.has_offsets else None
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
