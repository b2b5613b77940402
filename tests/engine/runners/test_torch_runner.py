"""The torch runner on a CPU, including its GPU code paths; tests/gpu runs them on a GPU."""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_oracle, rewrite_config
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import SPARSE
from plan_builder import PlanBuilder, oracle_logits, random_tokens, run, run_in_chunks
from random_draws import random_draws
from safetensors.torch import load_file, save_file
from torch_cases import (
    ATOL,
    CPU,
    KERNELS,
    MODELS,
    DeviceLogitsCases,
    GraphCases,
    SamplingCases,
    ScoringCases,
    allocate,
    load_torch,
    normal,
    with_operations,
)

from neso.engine.addons.image_positions import RotaryPlan
from neso.engine.client.llm import LLM
from neso.engine.core.step_plan import StepPlan
from neso.engine.lora.adapter import LoraPlan
from neso.engine.parallel.layout import RankLayout
from neso.engine.parallel.sharding import shard_of
from neso.engine.runners.base import CacheLayout
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
from neso.engine.runners.torch import decode_graphs, sampling, triton_sampling
from neso.engine.runners.torch.decode_graphs import DecodeGraphs, batch_sizes
from neso.engine.runners.torch.decoder import run_mlp
from neso.engine.runners.torch.encoder import TorchLayerStack
from neso.engine.runners.torch.linears import (
    DenseLinear,
    ExpertMatrices,
    Float8Linear,
    Linear,
    stack_experts,
)
from neso.engine.runners.torch.operations import PlainOperations
from neso.engine.runners.torch.runner import TorchRunner
from neso.engine.runners.torch.step_inputs import AdapterRows, adapter_tiles, max_adapter_tiles
from neso.engine.runners.torch.weights import MLP, Experts, WeightLoader
from neso.engine.sampling.token_sampling import INVALID_TOKEN, SamplingBatch, choose
from neso.engine.weights.checkpoint import Checkpoint
from neso.generation import SamplingParams

Factory = Callable[..., Path]

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels are compiled here, not interpreted"
)


@pytest.fixture
def device() -> torch.device:
    return CPU


@interpreted
class TestUncapturedGraphs(GraphCases):
    pass


class TestSampling(SamplingCases):
    pass


@pytest.mark.parametrize("spread", [0.1, 5.0])
def test_nucleus_beyond_the_ordered_candidates_equals_numpy(
    monkeypatch: pytest.MonkeyPatch, spread: float
) -> None:
    monkeypatch.setattr(sampling, "_NUM_CANDIDATES", 8)
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((40, 384)) * spread).astype(np.float32)
    draws = random_draws(rng, 40, temperature=1.0)
    found = sampling.choose(torch.from_numpy(logits), draws).numpy()
    np.testing.assert_array_equal(found, choose(logits, draws))


@interpreted
def test_sampling_kernel_equals_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampling, "_BLOCK", 128)
    rng = np.random.default_rng(6)
    logits = (np.round(rng.standard_normal((10, 300)) * 16) / 8).astype(np.float32)
    logits[0, 7], logits[1] = np.nan, -np.inf
    filters = [
        (1.0, 0, 0.9, 0.0),
        (0.0, 0, 1.0, 0.0),
        (0.0, 3, 0.5, 0.1),
        (1.0, 0, 1.0, 0.0),
        (0.7, 20, 1.0, 0.0),
        (2.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.5, 40, 0.6, 0.01),
        (1.0, 1, 1.0, 0.0),
        (1.0, 1000, 0.999, 0.0),
    ]
    draws = SamplingBatch.of([(*row, uniform) for row, uniform in zip(filters, rng.random(10), strict=True)])
    found = triton_sampling.sample(
        torch.from_numpy(logits), *sampling.sampling_parameters(draws, CPU)
    ).numpy()
    np.testing.assert_array_equal(found, choose(logits, draws))
    assert found[:2].tolist() == [INVALID_TOKEN] * 2


class TestScoring(ScoringCases):
    pass


class TestDeviceLogits(DeviceLogitsCases):
    pass


def plan_of(lengths: list[int], rows: list[int] | None = None) -> StepPlan:
    builder = PlanBuilder(num_blocks=1024)
    return builder.plan([(builder.sequence([7] * length), length) for length in lengths], rows=rows)


@pytest.mark.parametrize(
    ("plan", "fits"),
    [
        (plan_of([1]), True),
        (plan_of([1, 1, 1]), True),
        (plan_of([1] * 20), True),
        (plan_of([1] * 21), False),
        (plan_of([1, 2]), False),
        (plan_of([3]), False),
        (plan_of([1, 1, 1], rows=[0, 1]), False),
        (plan_of([1, 1, 1], rows=[2, 1, 0]), False),
        (plan_of([1, 1, 1], rows=[]), False),
        (plan_of([1, 1]).with_part(LoraPlan(np.array([1, -1], np.int32))), True),
        (plan_of([1, 1]).with_part(RotaryPlan(np.full((3, 2), -1, np.int32))), True),
        (plan_of([1, 1]).with_part(RotaryPlan(np.array([[0, 0], [0, 0], [-1, 0]], np.int32))), False),
    ],
    ids=[
        *("one", "three", "all", "too many", "mixed", "prefill", "some rows", "other order", "no rows"),
        *("adapters", "after an image", "in an image"),
    ],
)
def test_only_plain_decodes_fit_a_graph(plan: StepPlan, fits: bool) -> None:
    assert graphs_of(20).fits(plan) is fits


def graphs_of(max_batch: int) -> DecodeGraphs:
    """Graphs of a model whose logits are token ids."""
    return DecodeGraphs(lambda inputs: inputs.token_ids[:, None].float(), 4, 1024, 8, max_batch, CPU)


@pytest.mark.parametrize("largest", [1, 3, 8, 100, 256, 1000, 1024, 3000])
def test_graphs_are_captured_up_to_the_largest_batch(largest: int) -> None:
    sizes = batch_sizes(largest)
    assert sizes == sorted({*sizes}) and sizes[-1] == largest
    padding = np.diff(sizes) - 1
    assert all(padding <= np.maximum(8, np.array(sizes[1:]) / 8))
    assert largest > 1024 or len(sizes) <= 51


def test_batches_run_in_the_next_larger_graph() -> None:
    graphs = graphs_of(20)
    assert graphs._sizes == [1, 2, 4, 8, 16, 20]
    for count in (1, 3, 17, 20, 5):
        assert graphs.run(plan_of([1] * count)).tolist() == [[7.0]] * count


def test_graphs_end_at_the_option_or_at_the_sequences_of_a_step(checkpoint_factory: Factory) -> None:
    directory = checkpoint_factory("llama")
    for option, max_num_seqs, expected in ((1024, 12, 12), (5, 12, 5)):
        runner = load_torch(directory, max_cuda_graph_batch=option)
        runner.allocate_cache(CacheLayout(8, 16, max_num_seqs=max_num_seqs))
        assert runner._cache is not None
        assert runner._capture(runner._cache, 2)._sizes[-1] == expected
        runner.device = torch.device("cuda", 0)
        assert runner._uses_graphs
    runner = load_torch(directory, max_cuda_graph_batch=0)
    runner.device = torch.device("cuda", 0)
    assert not runner._uses_graphs


def test_steps_are_warmed_up_on_the_stream_that_captures_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins record what a GPU would do. Other threads may use it during a capture."""
    events: list[object] = []

    class Graph:
        def replay(self) -> None:
            events.append("replay")

    @contextmanager
    def use(*event: object) -> Iterator[None]:
        events.append(event)
        yield

    def capture(graph: Graph, pool: object, stream: object, *, capture_error_mode: str) -> Any:
        return use("capture", pool, stream, capture_error_mode)

    graphs = graphs_of(4)
    graphs._device, graphs._pool = torch.device("cuda", 0), "pool"
    graphs._stream = SimpleNamespace(wait_stream=lambda other: events.append(("wait", other)))
    graphs._forward = lambda inputs: events.append("step") or torch.zeros(2, 5)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: use("stream", stream))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    replay = graphs._capture(graphs._first(2, False))
    warm_up = [("wait", "current"), ("stream", graphs._stream), "step"]
    assert events == [*warm_up, ("capture", "pool", graphs._stream, "thread_local"), "step"]
    replay()
    assert events[-1] == "replay"


def test_a_step_runs_on_the_device_of_its_runner(
    checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the current one of the thread is. The step fails here, because this device is no GPU."""
    runner, used = load_torch(checkpoint_factory("llama")), []
    runner.device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    with pytest.raises(RuntimeError, match="allocate_cache"):
        runner.step(plan_of([1]))
    assert used == [runner.device]


def test_no_call_of_where_has_a_scalar() -> None:
    """`torch.where` copies a scalar to the GPU and waits for it, which is an error while a graph is captured."""
    for path in Path(decode_graphs.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.where":
                for argument in node.args:
                    text = ast.unparse(argument)
                    assert not (text.isupper() or text.strip("-")[0].isdigit()), f"{path.name}:{node.lineno}"


@given(
    slots=st.lists(st.integers(-1, 5), max_size=90),
    tile_rows=st.sampled_from([AdapterRows.FEW, AdapterRows.MANY]),
)
@settings(max_examples=50, deadline=None)
def test_adapter_tiles_have_every_row_with_an_adapter_once(slots: list[int], tile_rows: int) -> None:
    tiles = adapter_tiles(np.array(slots, np.int32), tile_rows)
    assert tiles.shape[1] == tile_rows
    assert sorted(tiles[tiles >= 0]) == [row for row, slot in enumerate(slots) if slot >= 0]
    for tile in tiles.tolist():
        count = sum(row >= 0 for row in tile)
        assert count
        assert tile[count:] == [-1] * (tile_rows - count)
        assert len({slots[row] for row in tile[:count]}) == 1
    if tile_rows == AdapterRows.FEW:
        assert len(tiles) <= max_adapter_tiles(len(slots), 6)


@interpreted
@pytest.mark.parametrize("name", MODELS)
def test_mixed_step_with_kernels_equals_transformers(checkpoint_factory: Factory, name: str) -> None:
    arch, overrides = MODELS[name]
    directory = checkpoint_factory(arch, **overrides)
    runner = with_operations(load_torch(directory, dtype="float32"), KERNELS)
    builder, oracle = PlanBuilder(4, 64), load_oracle(directory)
    allocate(runner, builder, graphs=False)
    one, two, three = (builder.sequence(random_tokens(length, seed=length)) for length in (12, 25, 19))
    expected = {s.sequence_id: oracle_logits(oracle, s.tokens) for s in (one, two, three)}
    for advances in ([(one, 11), (two, 5)], [(three, 17), (one, 1), (two, 20)], [(three, 2)]):
        requested = [
            expected[s.sequence_id][s.num_computed : s.num_computed + count] for s, count in advances
        ]
        np.testing.assert_allclose(run(runner, builder.plan(advances)), np.concatenate(requested), atol=ATOL)


class ExpertKernels(PlainOperations):
    """Kernels for experts only: the interpreter is slow."""

    def experts(self, *arguments: Any) -> torch.Tensor:
        return KERNELS.experts(*arguments)


@interpreted
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe dense layers"])
def test_expert_kernels_equal_transformers(checkpoint_factory: Factory, name: str) -> None:
    arch, overrides = SPARSE[name]
    directory, tokens = checkpoint_factory(arch, **overrides), random_tokens(12)
    runner, builder = with_operations(load_torch(directory, dtype="float32"), ExpertKernels()), PlanBuilder()
    runner.allocate_cache(builder.layout)
    found = run_in_chunks(runner, builder, tokens, [10, 1, 1])
    np.testing.assert_allclose(found, oracle_logits(load_oracle(directory), tokens), atol=ATOL)


@interpreted
def test_expert_kernels_on_ranks_add_up_to_the_whole_layer(checkpoint_factory: Factory) -> None:
    directory = checkpoint_factory("qwen2_moe", num_hidden_layers=1)
    loaded = load_torch(directory, dtype="float32")
    x = normal(6, loaded.spec.hidden_size)

    def of_rank(layout: RankLayout) -> torch.Tensor:
        shard = shard_of(loaded.spec, layout)
        with Checkpoint(directory) as source:
            weights = WeightLoader(shard, source, RunnerOptions(dtype="float32"), CPU).load()
        return run_mlp(shard.spec, KERNELS, weights.layers[0].mlp, x)

    expected = run_mlp(loaded.spec, PlainOperations(), loaded._decoder.weights.layers[0].mlp, x)
    parts = [of_rank(RankLayout(rank, 2)) for rank in range(2)]
    assert all(part.abs().max() > 0.01 for part in parts)
    torch.testing.assert_close(parts[0] + parts[1], expected, rtol=1e-4, atol=1e-4)


def test_experts_without_tokens_are_an_empty_sum() -> None:
    matrices = ExpertMatrices(normal(3, 8, 4)), ExpertMatrices(normal(3, 4, 4))
    experts = Experts(DenseLinear(normal(3, 4)), *matrices, None)
    chosen, weights = torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)
    for operations in (KERNELS, PlainOperations()):
        assert operations.experts(normal(0, 4), experts, chosen, weights, "silu").shape == (0, 4)


def test_stacked_experts_are_dense_unless_all_are_float8() -> None:
    dense, float8 = DenseLinear(normal(6, 4)), Float8Linear.quantized(normal(6, 4, seed=1))
    mixed = stack_experts([dense, float8], torch.float32)
    assert mixed.scales is None
    assert torch.equal(mixed.values, torch.stack([dense.weight, float8.dequantized(torch.float32)]))
    stacked = stack_experts([float8, float8], torch.float32)
    assert stacked.values.dtype == torch.float8_e4m3fn
    x = normal(3, 4, seed=2)
    assert torch.equal(stacked[1](x), float8(x))


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def logits_of(runner: TorchRunner, tokens: list[int]) -> np.ndarray:
    builder = PlanBuilder()
    runner.allocate_cache(builder.layout)
    return run_in_chunks(runner, builder, tokens, [len(tokens) - 3, 1, 2])


def linears(runner: TorchRunner) -> list[Linear]:
    found: list[Linear] = []
    for layer in runner._decoder.weights.layers:
        assert isinstance(layer.mlp, MLP)
        found += (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
    return found


def test_bfloat16_weights_compute_in_bfloat16(checkpoint_factory: Factory) -> None:
    directory = checkpoint_factory("llama", dtype="bfloat16")
    runner, tokens = load_torch(directory), random_tokens(30)
    assert runner._decoder.weights.dtype == torch.bfloat16
    logits = logits_of(runner, tokens)
    assert runner._cache is not None and runner._cache.layers[0].keys.dtype == torch.bfloat16
    assert runner.cache_bytes_per_block(4) * 2 == load_torch(
        directory, dtype="float32"
    ).cache_bytes_per_block(4)
    error = relative_error(logits, oracle_logits(load_oracle(directory), tokens))
    # Each of about 25 operations rounds with a relative error of 2^-9; errors of float32 are far smaller.
    assert 1e-4 < error < 25 * 2**-9


# A weight of e4m3 has 4 bits, so it errs by 2^-4 of itself at most and, over all mantissas, by about 2.6% in the mean
# square; so does a product with random inputs. The few subnormal weights err by less than 1e-5 of the
# largest. Scales in bfloat16 add 0.2%; short rows vary more.
OF_FLOAT8 = 0.036


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [None, 3.0])
def test_float8_product_is_close_to_dense(kind: torch.dtype, bias: float | None) -> None:
    """Inputs with outliers, and weights as small as in large models."""
    weight, x = normal(60, 200) * 2e-3, normal(9, 200, seed=1).to(kind)
    x[2] *= 3000
    added = None if bias is None else torch.full((60,), bias, dtype=kind)
    linear = Float8Linear.quantized(weight.to(kind), added)
    found = linear(x)
    assert found.dtype == kind
    expected = torch.nn.functional.linear(x.float(), weight, None if added is None else added.float())
    for row, requested in zip(found.float().numpy(), expected.numpy(), strict=True):
        assert relative_error(row, requested) < OF_FLOAT8


def test_product_with_stored_codes_equals_dequantized() -> None:
    codes, scales = (normal(48, 80) * 100).to(torch.float8_e4m3fn), normal(48, seed=1).abs()
    bias, x = normal(48, seed=2), normal(5, 80, seed=3)
    expected = DenseLinear(codes.float() * scales[:, None], bias)(x)
    torch.testing.assert_close(Float8Linear(codes, scales, bias)(x), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_float8_logits_are_close(checkpoint_factory: Factory, name: str) -> None:
    # Weights as small as those of real models: the residual stream dominates, and softmax is not sharp.
    directory = checkpoint_factory(name, initializer_range=0.05)
    dense, tokens = load_torch(directory, dtype="float32"), random_tokens(40)
    quantized = load_torch(directory, dtype="float32", quantization="fp8")
    assert all(isinstance(linear, Float8Linear) for linear in linears(quantized))
    assert isinstance(quantized._decoder.weights.lm_head, DenseLinear)
    assert not any(isinstance(linear, Float8Linear) for linear in linears(dense))
    error = relative_error(logits_of(quantized, tokens), logits_of(dense, tokens))
    # The errors of twelve products are independent, none larger than the residual stream.
    assert 1e-3 < error < OF_FLOAT8 * 12**0.5


def quantized_like_fbgemm(source: Path, directory: Path) -> tuple[Path, Path]:
    """A float8 checkpoint with a scale per output, and a dense one with the same weights."""
    stored, dense = (Path(shutil.copytree(source, directory / name)) for name in ("stored", "dense"))
    codes, plain = load_file(source / "model.safetensors"), load_file(source / "model.safetensors")
    for name in [name for name in plain if "_proj.weight" in name]:
        scales = plain[name].abs().amax(dim=1, keepdim=True) / 448
        codes[name] = (plain[name] / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
        codes[f"{name}_scale"] = scales
        plain[name] = codes[name].float() * scales
    save_file(codes, stored / "model.safetensors")
    save_file(plain, dense / "model.safetensors")
    rewrite_config(stored, quantization_config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})
    return stored, dense


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_stored_float8_equals_its_dequantized_weights(
    checkpoint_factory: Factory, tmp_path: Path, quantization: Any
) -> None:
    stored, dense = quantized_like_fbgemm(checkpoint_factory("qwen2"), tmp_path)
    runner, tokens = load_torch(stored, dtype="float32", quantization=quantization), random_tokens(30)
    for linear in linears(runner):
        assert isinstance(linear, Float8Linear)
        assert linear.codes.dtype == torch.float8_e4m3fn
    expected = logits_of(load_torch(dense, dtype="float32"), tokens)
    np.testing.assert_allclose(logits_of(runner, tokens), expected, atol=ATOL)


@interpreted
def test_stored_float8_experts_equal_their_dequantized_weights(
    checkpoint_factory: Factory, tmp_path: Path
) -> None:
    stored, dense = quantized_like_fbgemm(checkpoint_factory("qwen2_moe", num_hidden_layers=1), tmp_path)
    loaded, tokens = load_torch(stored, dtype="float32"), random_tokens(12)
    assert [matrices.values.dtype for matrices in expert_matrices(loaded)] == [torch.float8_e4m3fn] * 2
    expected = logits_of(load_torch(dense, dtype="float32"), tokens)
    for operations in (PlainOperations(), ExpertKernels()):
        found = logits_of(with_operations(loaded, operations), tokens)
        np.testing.assert_allclose(found, expected, atol=ATOL)


def expert_matrices(runner: TorchRunner) -> list[ExpertMatrices]:
    found: list[ExpertMatrices] = []
    for layer in runner._decoder.weights.layers:
        assert isinstance(layer.mlp, Experts)
        found += (layer.mlp.gate_up, layer.mlp.down)
    return found


def test_experts_are_quantized_to_float8(checkpoint_factory: Factory) -> None:
    # All experts are chosen, because rounding may change which ones are.
    directory = checkpoint_factory("olmoe", initializer_range=0.05, num_experts=3, num_experts_per_tok=3)
    dense, tokens = load_torch(directory, dtype="float32"), random_tokens(40)
    quantized = load_torch(directory, dtype="float32", quantization="fp8")
    assert all(matrices.scales is not None for matrices in expert_matrices(quantized))
    assert all(matrices.scales is None for matrices in expert_matrices(dense))
    error = relative_error(logits_of(quantized, tokens), logits_of(dense, tokens))
    assert 1e-3 < error < OF_FLOAT8 * 12**0.5


@pytest.mark.parametrize("quantization", ["int8", "int4", "int8_dynamic"])
def test_unsupported_quantization_is_rejected(llama_checkpoint: Path, quantization: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"does not quantize to {quantization} on cpu; it has fp8"):
        load_torch(llama_checkpoint, quantization=quantization)


def test_step_before_allocate_cache(llama_checkpoint: Path) -> None:
    with pytest.raises(RuntimeError, match="allocate_cache"):
        load_torch(llama_checkpoint).step(plan_of([3]))


def test_engine_tokens_and_logprobs_equal_the_reference(llama_checkpoint: Path) -> None:
    """One batch of requests with logits on the host, on the device, and with logits processors."""
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 0, "repetition_penalty": 1.8, "frequency_penalty": 0.7, "logprobs": 2},
        {"temperature": 1.2, "seed": 5, "presence_penalty": 1.5},
        {"temperature": 0.9, "seed": 6, "top_p": 0.8, "logit_bias": {40: 4.0}},
        {"temperature": 2.0, "seed": 7, "top_k": 20, "n": 2},
        {"temperature": 1.5, "seed": 8, "min_p": 0.02, "logprobs": 0, "min_tokens": 4},
    ]
    params = [SamplingParams(max_tokens=14, ignore_eos=True, **fields) for fields in options]
    prompts = [random_tokens(5 + 7 * i, seed=i) for i in range(len(params))]
    found, expected = (
        LLM(llama_checkpoint, runner=name, dtype="float32").generate(prompts, params, progress=False)
        for name in ("torch", "reference")
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert [o.token_ids for o in ours.outputs] == [o.token_ids for o in theirs.outputs]
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            for mine, yours in zip(one.logprobs or [], other.logprobs or [], strict=True):
                assert mine.rank == yours.rank
                assert [entry[0] for entry in mine.top] == [entry[0] for entry in yours.top]
                assert mine.logprob == pytest.approx(yours.logprob, abs=1e-3)
    # Penalties, bias and seeds had an effect.
    assert len({tuple(result.outputs[0].token_ids) for result in found}) == len(found)


@pytest.mark.parametrize("lost", [False, True])
def test_a_gpu_that_fails_again_is_lost(monkeypatch, lost):
    def synchronize(device: torch.device) -> None:
        if lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    runner = TorchRunner.__new__(TorchRunner)
    runner.device = torch.device("cuda", 0)
    assert runner.has_lost_device() is lost
    layers = TorchLayerStack.__new__(TorchLayerStack)
    layers._device = runner.device
    assert layers.has_lost_device() is lost
    runner.device = torch.device("cpu")
    assert not runner.has_lost_device()
