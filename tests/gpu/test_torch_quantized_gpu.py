"""Products with quantized weights on a GPU, with compiled kernels."""

from __future__ import annotations

import pytest
import torch
from quantized_cases import QuantizedProductCases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def multiplied_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class TestCompiledProducts(QuantizedProductCases):
    pass
