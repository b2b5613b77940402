"""A tensor as a trace holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.server.datatypes import DataType
from neso.server.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TensorActivity:
    """A copy of a tensor's elements at some point of the execution: where it came by may change."""

    activity: str
    name: str
    datatype: DataType
    array: npt.NDArray[Any]

    @classmethod
    def of(cls, activity: str, tensor: Tensor) -> TensorActivity:
        return cls(activity, tensor.name, tensor.datatype, np.array(tensor.array))

    def as_dict(self) -> dict[str, str]:
        """In the form of Triton's trace files: all of it text."""
        return {
            "name": self.name,
            "data": ",".join(self._elements()),
            "shape": ",".join(map(str, self.array.shape)),
            "dtype": self.datatype.value,
        }

    def _elements(self) -> list[str]:
        flat = self.array.reshape(-1)
        if self.datatype is DataType.BYTES:
            return [f'"{element.decode(errors="replace")}"' for element in flat]
        if self.datatype is DataType.BOOL:
            flat = flat.astype(np.uint8)
        return [str(element) for element in flat]  # numpy's scalars have the shortest text that is exact
