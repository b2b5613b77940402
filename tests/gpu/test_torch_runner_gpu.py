"""The torch runner on a GPU: compiled kernels, captured graphs, float8 products."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_oracle
from oracle import greedy
from plan_builder import PlanBuilder, oracle_logits, random_tokens, run
from torch_cases import (
    ATOL,
    KERNELS,
    DeviceLogitsCases,
    GraphCases,
    KernelCases,
    SamplingCases,
    ScoringCases,
    allocate,
    load_torch,
    normal,
    with_operations,
)

from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest
from neso.engine.load.loader import load_engine
from neso.engine.runners.torch.linears import Float8Linear, round_to_float8
from neso.generation import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")

Factory = Callable[..., Path]
KINDS = [torch.float32, torch.float16, torch.bfloat16]
MAX_TOKENS = 24


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=KINDS, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def multiplied_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype


class TestCompiledKernels(KernelCases):
    pass


class TestCapturedGraphs(GraphCases):
    pass


class TestSampling(SamplingCases):
    device_type = "cuda"


class TestScoring(ScoringCases):
    pass


class TestDeviceLogits(DeviceLogitsCases):
    pass


@pytest.mark.parametrize(
    ("arch", "kind", "atol"),
    [("qwen3", "float32", ATOL), ("qwen3", "bfloat16", 0.5), ("qwen2_moe", "float32", ATOL)],
)
def test_captured_decode_equals_uncaptured(
    checkpoint_factory: Factory, arch: str, kind: str, atol: float
) -> None:
    """Also when the graph is replayed with other sequences and blocks."""
    directory = checkpoint_factory(arch)
    captured = with_operations(load_torch(directory, dtype=kind), KERNELS)
    uncaptured = with_operations(captured, KERNELS)
    builder = PlanBuilder(16, 256, seed=1)
    caches = allocate(captured, builder, graphs=True), allocate(uncaptured, builder, graphs=False)
    sequences = [builder.sequence(random_tokens(length + 6, seed=length)) for length in range(1, 200, 13)]
    prompts = builder.plan([(s, len(s.tokens) - 6) for s in sequences], rows=[])
    captured.step(prompts)
    uncaptured.step(prompts)
    for first, count in ((0, 8), (7, 8), (3, 8), (0, 16), (0, 5), (2, 1)):
        plan = builder.plan([(s, 1) for s in sequences[first : first + count]])
        np.testing.assert_allclose(run(captured, plan), run(uncaptured, plan), atol=atol)
    assert captured._graphs is not None
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        # All except the padding block.
        torch.testing.assert_close(one.keys[:-1], other.keys[:-1], atol=atol, rtol=0)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize("shape", [(64, 48), (512, 256), (60, 200)], ids=str)
def test_float8_product_equals_dequantized_codes(
    device: torch.device, kind: torch.dtype, bias: bool, rows: int, shape: tuple[int, int]
) -> None:
    weight, x = normal(*shape) * 2e-2, normal(rows, shape[1], seed=1).to(kind).to(device)
    added = normal(shape[0], seed=2).to(kind).to(device) if bias else None
    linear = Float8Linear.quantized(weight.to(device, kind), added)
    dense = linear.codes.float() * linear.scales[:, None]
    base = 0.0 if added is None else added.float()
    found = linear(x)
    assert found.dtype == kind and found.shape == (rows, shape[0])
    # Inputs of e4m3 have an error of about 2.6% (root mean square).
    exact = x.float() @ dense.T
    assert relative_error(found.float() - base, exact) < 0.04
    if torch.cuda.get_device_capability(device) >= (8, 9) and shape[0] % 16 == 0:
        codes, scales = round_to_float8(x)
        rounded = (codes.float() * scales) @ dense.T + base
        # The result is rounded to 8 bits, and tensor cores may keep less than float32 of a sum.
        assert relative_error(found, rounded) < 2**-8 + 2**-9


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_bfloat16_model_is_close_to_transformers(checkpoint_factory: Factory, quantization: Any) -> None:
    directory, tokens = (
        checkpoint_factory("qwen2", dtype="bfloat16", initializer_range=0.05),
        random_tokens(60),
    )
    runner = load_torch(directory, quantization=quantization)
    builder = PlanBuilder()
    runner.allocate_cache(builder.layout)
    sequence = builder.sequence(tokens)
    logits = np.concatenate([run(runner, builder.plan([(sequence, size)])) for size in (40, 1, 1, 18)])
    expected = oracle_logits(load_oracle(directory), tokens)
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    # See the bounds of the CPU test; here inputs are rounded to float8 too.
    assert error < (25 * 2**-9 if quantization is None else 0.036 * 24**0.5)


PROMPT_LENGTHS = (1, 5, 16, 17, 60, 130)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen2_moe"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_prefill_chunk": 7}, {"num_blocks": 48, "block_size": 4}],
    ids=["plain", "chunk-7", "tiny-cache"],
)
def test_tokens_equal_transformers(checkpoint_factory: Factory, arch: str, options: dict[str, int]) -> None:
    """Greedy decoding in float32, with requests that join a running batch."""
    directory = checkpoint_factory(arch)
    prompts = [random_tokens(length, 300, seed=length) for length in PROMPT_LENGTHS]
    expected = greedy(directory, prompts, MAX_TOKENS)
    config = EngineConfig.from_options(str(directory), {"runner": "torch", "dtype": "float32", **options})
    core, _ = load_engine(config)
    params, arrives = SamplingParams(temperature=0), random.Random(1)
    waiting = [
        EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling=params, max_tokens=MAX_TOKENS)
        for i, prompt in enumerate(prompts)
    ]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in waiting}
    while waiting or core.has_work:
        if waiting and arrives.random() < 0.3:
            assert core.add(waiting.pop(0)) == []
        for output in core.step():
            assert not output.error
            tokens[output.request_id] += output.token_ids
    assert tokens == {str(i): ids for i, ids in enumerate(expected)}
