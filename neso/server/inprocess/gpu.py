"""Tensors in a GPU's memory, which torch keeps and moves."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.server.datatypes import DataType
from neso.server.errors import InvalidArgument, Unsupported
from neso.server.inprocess import dlpack


def wrap(owner: Any) -> Any:
    """A `torch.Tensor` that shares the memory of an object with DLPack. Raises `ServerError`."""
    torch = _torch()
    try:
        return torch.from_dlpack(owner).contiguous()
    except (RuntimeError, BufferError, TypeError, AssertionError) as error:  # the last: no CUDA in it
        raise InvalidArgument(f"the object cannot be read through DLPack: {error}") from None


def upload(array: npt.NDArray[Any], index: int) -> Any:
    """A copy of an array on a GPU. Raises `Unsupported` when there is none."""
    torch = _torch()
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise Unsupported(f"there is no GPU {index} to move a tensor to")
    # torch takes arrays that it may write to only; it does not write.
    source = array.view(np.uint16) if array.dtype == dlpack.BFLOAT16 else array
    with torch.cuda.device(index):
        moved = torch.from_numpy(source if source.flags.writeable else source.copy()).cuda()
    return moved.view(torch.bfloat16) if array.dtype == dlpack.BFLOAT16 else moved


def download(tensor: Any) -> npt.NDArray[Any]:
    """A copy of a tensor on the host."""
    return dlpack.to_numpy(tensor.detach().cpu())


def datatype(tensor: Any) -> DataType:
    """The KServe datatype of a tensor. Raises `InvalidArgument`."""
    return DataType.of_numpy(dlpack.to_numpy(_torch().empty(0, dtype=tensor.dtype)).dtype)


def _torch() -> ModuleType:
    try:
        import torch
    except ImportError:
        raise Unsupported("tensors on a GPU need torch: pip install 'neso[torch]'") from None
    return torch
