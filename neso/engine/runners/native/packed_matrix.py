"""A weight matrix in the layout that the kernels stream (csrc/kernels/matrix.h)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import neso._native as _native

Kind = Literal["f32", "f16", "bf16", "int8", "int4"]

PANEL = 16
"""Outputs that lie next to each other; a matrix is padded to whole panels."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """Weights [outputs, inputs] in panels of 16 outputs.

    - data: uint8, the packed weights or codes
    - scales, offsets: float16[panels * groups * 16] of quantized kinds, to be multiplied by scale_factor; offsets
      None where the codes are symmetric
    - dynamic: whether activations may be rounded to 8 bits
    - input_order: int32[inputs] where columns are permuted
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

    def native(self) -> _native.Matrix:
        """The same for the kernels; it keeps the arrays alive."""
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
        """The fields that are arrays."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, np.ndarray)}

    def numbers(self) -> dict[str, Any]:
        """The fields that are not."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value for name, value in named.items() if not isinstance(value, np.ndarray | type(None))
        }


def _bits(values: npt.NDArray[np.float16] | None) -> npt.NDArray[np.uint16] | None:
    return None if values is None else values.view(np.uint16)
