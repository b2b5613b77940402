"""Between numpy and torch, without a copy on the CPU."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from neso.server.tensor import DataType, Tensor

# Requests are read-only, which torch cannot express; programs that write to their inputs get copies.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def to_torch(array: npt.NDArray[Any], device: torch.device, *, copy: bool) -> torch.Tensor:
    """On a device. On the CPU it shares the array's memory, unless `copy`."""
    if copy:
        array = array.copy()
    if array.dtype == DataType.BF16.dtype:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor.to(device)


def to_strings(name: str, array: npt.NDArray[Any]) -> list[str]:
    """Of a BYTES tensor of one dimension. Raises `InvalidArgument` if they are no UTF-8."""
    return Tensor(name, DataType.BYTES, array).strings()


def to_numpy(value: torch.Tensor | list[str]) -> npt.NDArray[Any]:
    """A result, in memory that numpy shares with it where it is on the CPU."""
    if isinstance(value, list):
        array = np.empty(len(value), np.object_)
        array[:] = value
        return array
    tensor = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DataType.BF16.dtype)
    return tensor.numpy()
