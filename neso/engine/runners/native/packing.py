"""Weight matrices in the layout of the C++ kernels (csrc/kernels/matrix.h): packing, quantization, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

import neso._native as _native
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
from neso.engine.thread_placement import ThreadPlacement
from neso.engine.weights.quantized import Float8Matrix, Matrix, QuantizedMatrix, can_stack, dense

Float32Array = npt.NDArray[np.float32]

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64
# Nodes get whole huge pages of 2 MB. Smaller matrices stay where the threads that pack them run.
_PLACED_BYTES = 4 << 20


class Arena:
    """Allocator of large huge-page chunks; memory is never freed individually.

    All weights are read in every step. With 4 KB pages, TLB misses cost a third of the bandwidth on a virtual machine,
    and most single matrices are too small for huge pages.
    """

    def __init__(self, threads: ThreadPlacement | None = None) -> None:
        """`threads`: threads that will read the memory; on several NUMA nodes, it is placed on them."""
        self._threads = threads if threads is not None and threads.nodes else None
        self._chunk = np.empty(0, np.uint8)
        self._used = 0

    def zeros(self, size: int, panels: int) -> npt.NDArray[np.uint8]:
        """Return zeroed uint8[size], aligned to 64 bytes, for a packed matrix with this number of panels.

        On several NUMA nodes, the panels of a large matrix are on the node of the thread that multiplies them.
        """
        if self._used + size > len(self._chunk):
            self._chunk = _native.zero_pages(max(size, _CHUNK_BYTES))
            self._used = 0
        piece = self._chunk[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._threads is not None and size >= _PLACED_BYTES:
            _native.touch_panels(piece, panels, self._threads.cpus)
        return piece

    def copy(self, array: npt.NDArray[np.uint8], panels: int) -> npt.NDArray[np.uint8]:
        """Return a copy of a packed matrix."""
        target = self.zeros(len(array), panels)
        np.copyto(target, array)
        return target


Kind = Literal["f32", "f16", "bf16", "int8", "int4"]

PANEL = 16
"""Outputs that are stored together; matrices are padded to whole panels."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """Weights [outputs, inputs] in panels of 16 outputs.

    - data: uint8, packed weights or codes
    - scales, offsets: float16[panels * groups * 16] of quantized kinds, in units of scale_factor; offsets are None
      for symmetric codes
    - dynamic: whether activations are quantized to 8 bits
    - input_order: int32[inputs] for permuted columns, or None
    - bias: float32[outputs] or None
    """

    kind: Kind
    outputs: int
    inputs: int
    data: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16] | None = None
    offsets: npt.NDArray[np.float16] | None = None
    group_size: int = 0
    scale_factor: float = 1.0
    dynamic: bool = False
    input_order: npt.NDArray[np.int32] | None = None
    bias: npt.NDArray[np.float32] | None = None

    @property
    def panels(self) -> int:
        return -(-self.outputs // PANEL)

    def native(self) -> _native.Matrix:
        """Return the matrix for the kernels; it keeps the arrays alive."""
        return _native.Matrix(
            self.kind,
            self.outputs,
            self.inputs,
            self.data,
            _bits(self.scales),
            _bits(self.offsets),
            self.group_size,
            self.scale_factor,
            self.dynamic,
            self.input_order,
            self.bias,
        )

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the array fields by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, np.ndarray)}

    def numbers(self) -> dict[str, Any]:
        """Return the other fields by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value for name, value in named.items() if not isinstance(value, np.ndarray | type(None))
        }


def _bits(values: npt.NDArray[np.float16] | None) -> npt.NDArray[np.uint16] | None:
    return None if values is None else values.view(np.uint16)


DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes by value of the option `dtype`."""
KINDS: dict[np.dtype[Any], Kind] = {
    np.dtype(np.float32): "f32",
    np.dtype(np.float16): "f16",
    np.dtype(ml_dtypes.bfloat16): "bf16",
}
# Scales are normalized to about this maximum: float16 then has 11 bits for scales up to 2^28 times smaller.
_LARGEST_SCALE = 2.0**14


@dataclass(frozen=True, slots=True)
class Scheme:
    """Symmetric codes of `bits` (8 or 4) with one scale per `group_size` inputs."""

    bits: int
    group_size: int


# Group sizes of llama.cpp's Q8_0 and Q4_0, with error-minimizing scales. Groups of 64 would save 3 % of the 8-bit
# weights, with a larger error than Q8_0.
INT8 = Scheme(bits=8, group_size=32)
INT4 = Scheme(bits=4, group_size=32)
# Activations have the same groups. Sums are scaled once for each group, which limits the rate of products.
INT8_DYNAMIC = Scheme(bits=8, group_size=256)
SCHEMES: dict[str | None, Scheme | None] = {
    None: None,
    "int8": INT8,
    "int4": INT4,
    "int8_dynamic": INT8_DYNAMIC,
}
"""Schemes by value of the option `quantization`."""


def quantize(weights: npt.NDArray[Any], scheme: Scheme, threads: int) -> QuantizedMatrix:
    """Quantize dense weights [outputs, inputs]."""
    outputs, inputs = weights.shape
    source = weights if weights.dtype in KINDS else weights.astype(np.float32)
    codes = np.empty((outputs, inputs), np.uint8)
    scales = np.empty((outputs, -(-inputs // scheme.group_size)), np.float32)
    _native.quantize(
        KINDS[source.dtype],
        _bytes(source),
        scheme.bits,
        scheme.group_size,
        codes,
        scales,
        threads,
    )
    return QuantizedMatrix(codes, scales, None, scheme.bits, scheme.group_size)


def reject_fp8(options: RunnerOptions) -> None:
    """Raises `UnsupportedOption` for fp8, which CPUs cannot multiply."""
    if options.quantization == "fp8":
        raise UnsupportedOption("fp8 weights need a GPU; on a CPU there are int8, int4 and int8_dynamic")


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs matrices with the given precision.

    - kind: of dense matrices
    - scheme: quantization of matrices that are dense in the checkpoint; None leaves them dense
    - dynamic: whether activations of quantized matrices are quantized to 8 bits
    """

    kind: Kind
    scheme: Scheme | None
    dynamic: bool
    threads: int
    arena: Arena = field(default_factory=Arena)

    @classmethod
    def from_options(cls, options: RunnerOptions, dtype: np.dtype[Any], threads: ThreadPlacement) -> Packer:
        """Create a packer. `dtype`: of matrices that stay dense."""
        dynamic = options.quantization == "int8_dynamic"
        return cls(KINDS[dtype], SCHEMES[options.quantization], dynamic, threads.count, Arena(threads))

    def pack(self, parts: Sequence[Matrix], bias: Float32Array | None = None) -> PackedMatrix:
        """Pack the parts, [outputs, inputs] each, stacked along the outputs."""
        # CPUs cannot multiply float8, so such weights become dense.
        known = [p.dequantize() if isinstance(p, Float8Matrix) else p for p in parts]
        if self.scheme is not None:
            known = [
                p if isinstance(p, QuantizedMatrix) else quantize(p, self.scheme, self.threads) for p in known
            ]
        quantized = [part for part in known if isinstance(part, QuantizedMatrix)]
        if len(quantized) == len(known) and can_stack(quantized):
            return self._pack_quantized(quantized, bias)
        return self._pack_dense([dense(part) for part in known], bias)

    def _pack_dense(self, parts: list[npt.NDArray[Any]], bias: Float32Array | None) -> PackedMatrix:
        outputs, inputs = sum(len(part) for part in parts), parts[0].shape[1]
        # Only float16 weights are stored as float16; weights of other dtypes may be outside its range.
        kind = self.kind
        if kind == "f16" and any(part.dtype != np.float16 for part in parts):
            kind = "f32"
        data = self.arena.zeros(_native.packed_bytes(kind, outputs, inputs), -(-outputs // PANEL))
        first = 0
        for part in parts:
            source = part if part.dtype in KINDS else part.astype(np.float32)
            _native.pack_dense(KINDS[source.dtype], _bytes(source), inputs, kind, first, data, self.threads)
            first += len(part)
        return PackedMatrix(kind, outputs, inputs, data, bias=bias)

    def _pack_quantized(self, parts: list[QuantizedMatrix], bias: Float32Array | None) -> PackedMatrix:
        outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
        kind: Kind = "int8" if parts[0].bits == 8 else "int4"
        data = self.arena.zeros(_native.packed_bytes(kind, outputs, inputs), -(-outputs // PANEL))
        first = 0
        for part in parts:
            _native.pack_codes(np.ascontiguousarray(part.codes), kind, first, data, self.threads)
            first += part.shape[0]
        scales = np.concatenate([part.scales for part in parts])
        symmetric = all(part.offsets is None for part in parts)
        offsets = None if symmetric else np.concatenate([part.explicit_offsets() for part in parts])
        largest = max(float(np.abs(a).max(initial=0)) for a in (scales, offsets) if a is not None)
        # A power of two, so that dividing by it is exact.
        factor = float(2.0 ** np.ceil(np.log2(largest / _LARGEST_SCALE))) if largest > 0 else 1.0
        return PackedMatrix(
            kind,
            outputs,
            inputs,
            data,
            scales=_pack_scales(scales, factor),
            offsets=None if offsets is None else _pack_scales(offsets, factor),
            group_size=parts[0].group_size,
            scale_factor=factor,
            dynamic=self.dynamic,
            input_order=parts[0].input_order,
            bias=bias,
        )


def _pack_scales(values: Float32Array, factor: float) -> npt.NDArray[np.float16]:
    """Convert float32[outputs, groups] to float16[panels * groups * 16], divided by `factor`."""
    outputs, groups = values.shape
    panels = -(-outputs // PANEL)
    padded = np.zeros((panels * PANEL, groups), np.float32)
    padded[:outputs] = values / np.float32(factor)
    return padded.reshape(panels, PANEL, groups).transpose(0, 2, 1).astype(np.float16).reshape(-1)


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the bytes of an array, which may be unaligned."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
