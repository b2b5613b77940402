"""In-process tensors in GPU memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import neso
from neso.server.inprocess import MemoryBuffer
from neso.server.inprocess.tensor import make_input

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, ml_dtypes.bfloat16])
def test_round_trip(dtype):
    array = np.ones((2, 3), dtype)
    moved = neso.Tensor.from_object(array).to_device("gpu:0")
    assert (moved.memory_type, moved.memory_type_id) == (neso.MemoryType.GPU, 0)
    assert moved.datatype is neso.Tensor.from_object(array).datatype and moved.size == array.nbytes
    assert moved.to_device(neso.MemoryType.GPU) is moved
    back = moved.to_host()
    assert back.memory_type is neso.MemoryType.CPU and (back.numpy() == array).all()


def test_gpu_tensors_stay_on_the_gpu():
    given = torch.arange(6, device="cuda", dtype=torch.float16).reshape(2, 3)
    tensor = neso.Tensor.from_dlpack(given)
    assert tensor.data_ptr == given.data_ptr() == MemoryBuffer.from_dlpack(given).data_ptr
    assert torch.from_dlpack(tensor).data_ptr() == given.data_ptr() and tensor.shape == (2, 3)


def test_inputs_are_copied_to_the_host():
    given = torch.arange(6, device="cuda", dtype=torch.bfloat16)
    assert make_input("X", given, None).array.tolist() == list(range(6))
    assert make_input("X", neso.Tensor.from_dlpack(given), None).array.tolist() == list(range(6))
