"""Quantized weights of the torch runner that keep their codes, with interpreted kernels; tests/gpu compiles them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_builder import PlanBuilder, random_tokens, run_in_chunks
from quantized_cases import QuantizedProductCases
from torch import Tensor
from torch_cases import CPU, load_torch, normal
from weights.packed_checkpoints import FORMATS, SHAPE, make_both
from weights.test_float8 import FORMS
from weights.test_float8 import make_both as make_float8

from neso.engine.parallel.layout import RankLayout
from neso.engine.parallel.sharding import shard_of
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.runners.torch import triton_quantized
from neso.engine.runners.torch.decoder import run_mlp
from neso.engine.runners.torch.linears import (
    DenseLinear,
    JoinedLinear,
    QuantizedExperts,
    QuantizedLinear,
)
from neso.engine.runners.torch.operations import PlainOperations
from neso.engine.runners.torch.runner import TorchRunner
from neso.engine.runners.torch.triton_operations import TritonOperations
from neso.engine.runners.torch.weights import DecoderWeights, Experts, WeightLoader
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint

Factory = Callable[..., Path]

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels are compiled here, not interpreted"
)
ATOL = 5e-4
# The interpreter is slow.
SMALL = {**SHAPE, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def one_split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.cls is None:
        monkeypatch.setattr(triton_quantized, "_splits", lambda programs, chunks, device: 1)


@pytest.fixture
def device() -> torch.device:
    return CPU


@pytest.fixture(params=[torch.float32, torch.float16], ids=str)
def multiplied_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class TestInterpretedProducts(QuantizedProductCases):
    pass


def load_weights(directory: Path, layout: RankLayout | None = None, **options: Any) -> DecoderWeights:
    """The weights as on a GPU."""
    with Checkpoint(directory) as source:
        shard = shard_of(decoder_spec(source.config), layout or RankLayout(0, 1))
        return WeightLoader(shard, source, RunnerOptions(**options), CPU, keeps_codes=True).load()


def with_weights(runner: TorchRunner, weights: DecoderWeights) -> TorchRunner:
    return TorchRunner(runner.shard, replace(runner._decoder, weights=weights), CPU)


def logits_of(runner: TorchRunner) -> np.ndarray:
    builder, tokens = PlanBuilder(), random_tokens(30)
    runner.allocate_cache(builder.layout)
    return run_in_chunks(runner, builder, tokens, [28, 1, 1])


def tensors_of(weights: object) -> Iterator[Tensor]:
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, list):
        for item in weights:
            yield from tensors_of(item)
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from tensors_of(getattr(weights, field.name))


def bytes_of(weights: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(weights))


@pytest.mark.parametrize("name", ["awq", "gptq-8", "fp8-blocks"])
def test_checkpoint_gives_the_logits_of_dense_weights(
    checkpoint_factory: Factory, tmp_path: Path, name: str
) -> None:
    if name == "fp8-blocks":
        both = make_float8(checkpoint_factory("llama", **SMALL), tmp_path, FORMS[name])
    else:
        both = make_both(checkpoint_factory("llama", **SMALL), tmp_path, FORMATS[name])
    dense = load_torch(both[1], dtype="float32")
    weights = load_weights(both[0], dtype="float32")
    assert isinstance(weights.layers[1].qkv, QuantizedLinear)
    assert isinstance(weights.lm_head, DenseLinear)
    found, expected = logits_of(with_weights(dense, weights)), logits_of(dense)
    np.testing.assert_allclose(found, expected, atol=ATOL)
    np.testing.assert_array_equal(found.argmax(axis=1), expected.argmax(axis=1))


@pytest.mark.parametrize(("name", "stacked"), [("awq", True), ("gptq-act-order", False)])
def test_experts_are_multiplied_together_unless_their_inputs_are_ordered(
    checkpoint_factory: Factory, tmp_path: Path, name: str, stacked: bool
) -> None:
    """In act-order, each matrix of the test has its own order of the inputs, so the experts run one by one."""
    source = checkpoint_factory("qwen3_moe", hidden_size=64, num_hidden_layers=1, moe_intermediate_size=32)
    both = make_both(source, tmp_path, FORMATS[name])
    dense, weights = load_torch(both[1], dtype="float32"), load_weights(both[0], dtype="float32")
    mlp, expected = weights.layers[0].mlp, dense._decoder.weights.layers[0].mlp
    assert isinstance(mlp, Experts) and mlp.stacked == stacked
    assert isinstance(mlp.gate_up, QuantizedExperts) == stacked
    x = normal(5, 64)
    found = run_mlp(dense.spec, TritonOperations(), mlp, x)
    torch.testing.assert_close(
        found, run_mlp(dense.spec, PlainOperations(), expected, x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(("name", "bits"), [("gptq", 4 + 1), ("gptq-8", 8 + 1), ("fp8-blocks", 8 + 1)])
def test_codes_are_not_expanded_in_memory(
    checkpoint_factory: Factory, tmp_path: Path, name: str, bits: int
) -> None:
    """A group of 32 inputs has a scale and an offset of 16 bits, or a scale of 32 bits."""
    if name == "fp8-blocks":
        stored, _ = make_float8(checkpoint_factory("llama", **SMALL), tmp_path, FORMS[name])
    else:
        stored, _ = make_both(checkpoint_factory("llama", **SMALL), tmp_path, FORMATS[name])
    kept, expanded = load_weights(stored, dtype="float16"), load_torch(stored, dtype="float16")
    for matrix in ("qkv", "output"):
        ours = bytes_of(getattr(kept.layers[1], matrix))
        assert ours <= bytes_of(getattr(expanded._decoder.weights.layers[1], matrix)) * bits / 16
    assert bytes_of(kept) < bytes_of(expanded._decoder.weights)


def test_biases_and_matrices_left_dense_beside_quantized_ones(
    checkpoint_factory: Factory, tmp_path: Path
) -> None:
    source = checkpoint_factory("qwen2", **SMALL)
    both = make_both(source, tmp_path, FORMATS["gptq-act-order"], dense_names=["layers.0.self_attn.v_proj"])
    dense, weights = load_torch(both[1], dtype="float32"), load_weights(both[0], dtype="float32")
    # In act-order, each matrix of the test has its own order of the inputs.
    for layer in weights.layers:
        assert isinstance(layer.qkv, JoinedLinear)
    kinds = [[type(part) for part in layer.qkv.parts] for layer in weights.layers[:2]]  # type: ignore[union-attr]
    assert kinds == [[QuantizedLinear, QuantizedLinear, DenseLinear], [QuantizedLinear] * 3]
    np.testing.assert_allclose(logits_of(with_weights(dense, weights)), logits_of(dense), atol=ATOL)


@pytest.mark.parametrize("name", ["gptq", "fp8-blocks"])
def test_shards_of_ranks_keep_their_codes(checkpoint_factory: Factory, tmp_path: Path, name: str) -> None:
    """The products of two ranks add up to that of the whole MLP."""
    if name == "gptq":
        both = make_both(checkpoint_factory("llama", **SMALL), tmp_path, FORMATS[name])
    else:
        both = make_float8(checkpoint_factory("llama", **SMALL), tmp_path, FORMS[name])
    x, plain = normal(3, SHAPE["hidden_size"]), PlainOperations()
    whole = load_torch(both[1], dtype="float32")
    spec = whole.spec
    total = torch.zeros_like(x)
    for rank in range(2):
        layout = RankLayout(rank, 2)
        layer = load_weights(both[0], layout, dtype="float32").layers[1]
        for linear in (layer.qkv, layer.mlp.gate_up, layer.mlp.down):  # type: ignore[union-attr]
            assert isinstance(linear, QuantizedLinear)
        total += run_mlp(shard_of(spec, layout).spec, plain, layer.mlp, x)
    expected = run_mlp(spec, plain, whole._decoder.weights.layers[1].mlp, x)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.02), ("int4", 0.3)])
def test_dense_weights_are_quantized_while_loading(
    checkpoint_factory: Factory, quantization: Any, error: float
) -> None:
    # Weights as small as those of real models: the residual stream dominates.
    dense = load_torch(checkpoint_factory("llama", **SMALL, initializer_range=0.05), dtype="float32")
    weights = load_weights(
        checkpoint_factory("llama", **SMALL, initializer_range=0.05),
        dtype="float32",
        quantization=quantization,
    )
    assert isinstance(weights.lm_head, DenseLinear)
    for layer in weights.layers:
        assert isinstance(layer.qkv, QuantizedLinear) and layer.qkv.weights.format == quantization
    found, expected = logits_of(with_weights(dense, weights)), logits_of(dense)
    assert 1e-4 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < error
