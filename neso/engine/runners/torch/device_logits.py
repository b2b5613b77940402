"""Logits that stay on the device until somebody wants to see them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Float32Array = npt.NDArray[np.float32]


class DeviceLogits:
    """float32[R, vocab_size] that reads like an array: what is indexed is copied to the host."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: int | slice | list[int]) -> Float32Array:
        """A copy."""
        picked: Float32Array = self.values[rows].cpu().numpy()
        return picked.copy() if self.values.device.type == "cpu" else picked

    @torch.inference_mode()
    def __setitem__(self, row: int, logits: Float32Array) -> None:
        self.values[row] = torch.from_numpy(logits).to(self.values.device)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self[:], dtype)
