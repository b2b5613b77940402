"""ggml's quantized blocks, read into groups of 32 codes with a scale and maybe an offset each.

The layouts are those of ggml-common.h, where `d` is the scale of a block. All functions take M blocks,
uint8[M, bytes of a block].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

GROUP = 32


@dataclass(frozen=True, slots=True)
class Groups:
    """As in `QuantizedMatrix`: codes uint8[M, block], scales and offsets float32[M, block / 32]."""

    codes: UInt8Array
    scales: Float32Array
    offsets: Float32Array | None = None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`groups` reads blocks into codes of `bits`; `exact` into the very values they stand for, float32[M, block]."""

    bits: int
    groups: Callable[[UInt8Array], Groups]
    exact: Callable[[UInt8Array], Float32Array]


def _q8_0(blocks: UInt8Array) -> Groups:
    """d float16, then 32 signed codes."""
    return Groups(blocks[:, 2:] ^ np.uint8(0x80), _float16(blocks[:, :2]))


def _q4_0(blocks: UInt8Array) -> Groups:
    """d float16, then 16 bytes: the first 16 codes in the low halves, the others in the high ones."""
    return Groups(_nibbles(blocks[:, 2:]), _float16(blocks[:, :2]))


def _q4_k(blocks: UInt8Array) -> Groups:
    """d and dmin float16, 6-bit scales and minima of 8 groups in 12 bytes, then 4 x 32 bytes of nibbles."""
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    # Four plain, then four whose upper two bits are those that the first four have no use for.
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 256)
    return Groups(codes, _float16(blocks[:, 0:2]) * scales, -(_float16(blocks[:, 2:4]) * minima))


def _q6_k(blocks: UInt8Array) -> Groups:
    """Requantized: Q6_K has a scale for each 16 codes of 6 bits, `QuantizedMatrix` for each 32 at the least.

    The two scales of a group are d times signed bytes. A quarter of the larger is the scale of the 8-bit codes, so
    that the half that it belongs to stays exact (4 x code), and so does the other where the scales are equal. Else
    the error is at most half a step, an eighth of the larger scale; where the two have opposite signs, the code
    128 is out of reach, and 127 is a whole step off.
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
    """Codes uint8[M, 256] from 0 to 63 (standing for -32 to 31), scales float32[M, 16], d float32[M, 1].

    128 bytes of lower 4 bits, 64 bytes of upper 2 bits, 16 scales (int8), d float16. Each half of the block has
    its 128 codes in four runs of 32: two in the low nibbles, two in the high ones.
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
    """Low halves, then high halves: uint8[M, n] to uint8[M, 2n]."""
    count = packed.shape[1]
    codes = np.empty((len(packed), 2 * count), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :count])
    np.right_shift(packed, 4, out=codes[:, count:])
    return codes


def _float16(pairs: UInt8Array) -> Float32Array:
    """The float16 that two bytes are: uint8[M, 2] to float32[M, 1]."""
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
