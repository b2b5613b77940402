"""Every Triton kernel against plain torch operations, interpreted on the CPU; tests/gpu runs them compiled."""

from __future__ import annotations

import os

import pytest
import torch
from torch_cases import CPU, KernelCases

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels are compiled here"),
    # The sigmoid of -200; on a GPU it is 0 as well.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


@pytest.fixture
def device() -> torch.device:
    return CPU


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


# Triton's interpreter multiplies the bits of bfloat16 numbers as if they were integers.
@pytest.fixture(params=[torch.float32, torch.float16], ids=str)
def multiplied_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class TestInterpretedKernels(KernelCases):
    pass
