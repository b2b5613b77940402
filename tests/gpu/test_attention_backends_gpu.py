"""Attention backends of the torch runner, with the libraries that are installed."""

from __future__ import annotations

import pytest
import torch
from attention_cases import AttentionBackendCases

from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.runners.torch.attention import AttentionBackend, open_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=["flash_attn", "flashinfer"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> AttentionBackend:
    pytest.importorskip(request.param)
    found = open_attention(device, RunnerOptions(attention_backend=request.param))
    assert isinstance(found, AttentionBackend)
    return found


class TestLibraries(AttentionBackendCases):
    pass
