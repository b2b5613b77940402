"""Arrays on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def send(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device that the host does not wait for; on the CPU the array itself.

    Through pinned memory: from other memory the copy would wait for what the device computes.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def send_together(arrays: list[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as int32 tensors on the device, in one transfer: views of one buffer."""
    packed = send(np.concatenate([array.reshape(-1) for array in arrays]).astype(np.int32), device)
    pieces = packed.split([array.size for array in arrays])
    return [piece.view(array.shape) for piece, array in zip(pieces, arrays, strict=True)]
