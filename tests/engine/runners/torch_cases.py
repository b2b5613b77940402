"""Test cases of the torch runner for any device: CPU tests interpret the kernels, GPU tests compile them.

A subclass defines the fixtures `device`, `dtype` and `multiplied_dtype` (dtype of products in kernels). Expected
values are always computed on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_builder import PlanBuilder, Tracked, random_tokens, run
from random_draws import assert_neighbours, random_draws
from torch import Tensor

from neso.engine.addons.image_positions import RotaryPlan
from neso.engine.core.request import EngineRequest
from neso.engine.core.step_plan import StepPlan
from neso.engine.lora.adapter import TARGETS, LoraAdapter, LoraPlan, LowRank, Target
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.runners.torch import triton_attention as attention_kernels
from neso.engine.runners.torch.adapters import AdapterStack, Change
from neso.engine.runners.torch.decode_graphs import DecodeGraphs
from neso.engine.runners.torch.device_runner import DeviceLogits, LaunchedDeviceLogits
from neso.engine.runners.torch.kv_cache import KVCache, LayerCache
from neso.engine.runners.torch.linears import (
    DenseLinear,
    ExpertMatrices,
    Float8Linear,
    multiplies_float8,
    round_to_float8,
    stack_experts,
)
from neso.engine.runners.torch.operations import Operations, PlainOperations
from neso.engine.runners.torch.runner import TorchRunner
from neso.engine.runners.torch.sampling import choose as choose_on_device
from neso.engine.runners.torch.step_inputs import AdapterRows, adapter_tiles, step_inputs
from neso.engine.runners.torch.triton_experts import assign_tiles, multiply_tiles
from neso.engine.runners.torch.triton_operations import TritonOperations, round_rows
from neso.engine.runners.torch.weights import Experts
from neso.engine.sampling.adjustments import LogitAdjustments
from neso.engine.sampling.sampler import sampling_batch
from neso.engine.sampling.state import SamplingState
from neso.engine.sampling.token_sampling import INVALID_TOKEN, SamplingBatch, choose
from neso.engine.sampling.token_scores import ScoreRequest, TokenScores, sample_and_score
from neso.engine.specs.decoder_spec import DecoderSpec, layer_shapes
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint
from neso.generation import SamplingParams

Factory = Callable[..., Path]

CPU = torch.device("cpu")
EPS = 1e-5

# Another order of summation; one or two roundings may each go the other way, or truncate.
SAME = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.float16: {"rtol": 2**-10, "atol": 2**-12},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-8},
}
# One rounding before adding two numbers of up to about 8.
ROTATED = {
    torch.float32: {"rtol": 1e-5, "atol": 5e-6},
    torch.float16: {"rtol": 2**-10, "atol": 2**-7},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-4},
}
# Compared with float32: weights of up to 1 and the result are rounded.
ATTENDED = {
    torch.float32: {"rtol": 2e-5, "atol": 5e-6},
    torch.float16: {"rtol": 2**-9, "atol": 2**-9},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6},
}

# The inner values, of up to about 8, and the result are rounded.
ADAPTED = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2**-9, "atol": 2**-6},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-3},
}

PLAIN, KERNELS = PlainOperations(), TritonOperations()


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal random numbers, generated on the CPU so that they are equal on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(found: Tensor, expected: Tensor, tolerances: Any = SAME) -> None:
    torch.testing.assert_close(found.cpu(), expected, **tolerances[expected.dtype])


@dataclass(frozen=True)
class Attention:
    """Sequences are (tokens in the cache, new tokens); splits are those of a decode step."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 16
    window: int | None = None
    sinks: int = 0
    softcap: float = 0.0
    splits: int = 4


MIXED = ((0, 5), (33, 1), (7, 18), (0, 1), (70, 2))
DECODES = ((0, 1), (63, 1), (64, 1), (150, 1))
ATTENTION = {
    "prefill of one tile": Attention(((0, 16),)),
    "prefill of three tiles": Attention(((0, 35),)),
    "prefill behind a long context": Attention(((130, 20),)),
    "decodes in 4 splits": Attention(DECODES),
    "decodes in 2 splits": Attention(DECODES, splits=2),
    "decodes in one split": Attention(DECODES, splits=1),
    "decodes in more splits than there are tiles of keys": Attention(DECODES, splits=16),
    "mixed batch": Attention(MIXED),
    "mixed batch, blocks of 1": Attention(MIXED, block_size=1),
    "mixed batch, blocks of 3": Attention(MIXED, block_size=3),
    "a head of keys for each of queries": Attention(MIXED, kv_heads=4),
    "one head of keys": Attention(MIXED, kv_heads=1),
    "groups of three heads": Attention(MIXED, heads=6),
    "decodes of groups wider than a tile": Attention(DECODES, heads=20, kv_heads=1),
    "window": Attention(MIXED, window=9),
    "window beyond a tile of keys": Attention((*MIXED, (150, 20), (180, 1)), window=70, block_size=3),
    "window of one token": Attention(MIXED, window=1),
    "window, one split": Attention(DECODES, window=70, splits=1),
    "sinks": Attention(MIXED, window=9, sinks=5),
    "sinks of several tiles of keys": Attention(
        (*MIXED, (190, 20), (250, 1)), window=9, sinks=80, block_size=3
    ),
    "sinks, one split": Attention(DECODES, window=20, sinks=3, splits=1),
    "sinks without a window": Attention(MIXED, sinks=5),
    "softcap": Attention(MIXED, softcap=2.5),
    "softcap and window": Attention(MIXED, softcap=2.5, window=9, splits=2),
    "values narrower than keys": Attention(MIXED, key_dim=24, value_dim=8),
    "values wider than keys": Attention(MIXED, key_dim=8, value_dim=24, softcap=5.0),
    "heads of 6": Attention(MIXED, key_dim=6, value_dim=6, kv_heads=1),
    "heads of 64": Attention(MIXED, key_dim=64, value_dim=64),
    "heads of 80": Attention(MIXED, key_dim=80, value_dim=80, block_size=3),
}


@dataclass(frozen=True)
class Adapters:
    """The ranks of each target in each slot, and the slot of each row."""

    ranks: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]


RANKS = ((1, 5, 0), (16, 16, 16), (0, 70, 3), (0, 0, 0))
ADAPTERS = {
    "several slots, more rows than a tile, and rows without": Adapters(
        RANKS, (2, -1, 0, 3, 2, 1, -1, *[0] * AdapterRows.FEW)
    ),
    "small ranks": Adapters(((3, 0, 2), (0, 0, 8)), (1, 0, 0, -1)),
}


def plan_of(case: Attention) -> StepPlan:
    builder = PlanBuilder(case.block_size, sum(-(-sum(s) // case.block_size) for s in case.sequences))
    sequences = [Tracked(i, [0] * (sum(s)), num_computed=s[0]) for i, s in enumerate(case.sequences)]
    return builder.plan([(tracked, new) for tracked, (_, new) in zip(sequences, case.sequences, strict=True)])


@dataclass(frozen=True)
class Routing:
    """Experts of each token; their weights are random."""

    chosen: Tensor
    count: int = 5

    @classmethod
    def random(cls, tokens: int, top_k: int, count: int, seed: int = 0) -> Routing:
        """Uneven: the first experts are the most probable ones."""
        bias = -torch.arange(count) / 2
        return cls((normal(tokens, count, seed=seed) + bias).topk(top_k).indices, count)


ROUTING = {
    "one token": Routing.random(1, 2, 5),
    "more experts than slots": Routing.random(3, 2, 12),
    "uneven": Routing.random(24, 3, 8),
    "experts without rows": Routing(torch.tensor([[4, 1], [1, 4], [4, 1]])),
    "a full tile and a row more": Routing(torch.tensor([[2]] * 65 + [[0]] * 2)),
    "one expert": Routing(torch.zeros(7, 1, dtype=torch.int64), 1),
}
# Two products, each summed in another order and rounded, of numbers of up to about 4.
EXPERTS = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-9, "atol": 2**-8},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-5},
}


def random_experts(
    count: int, dtype: torch.dtype, float8: bool, hidden: int = 70, width: int = 40
) -> Experts:
    def matrices(outputs: int, inputs: int, seed: int) -> ExpertMatrices:
        values = (normal(count, outputs, inputs, seed=seed) / inputs**0.5).to(dtype)
        linear = Float8Linear.quantized if float8 else DenseLinear
        stacked = stack_experts([linear(value) for value in values], dtype)
        assert isinstance(stacked, ExpertMatrices)
        return stacked

    gate_up, down = matrices(2 * width, hidden, 1), matrices(hidden, width, 2)
    return Experts(DenseLinear(normal(count, hidden, dtype=dtype)), gate_up, down, None)


def experts_on(device: torch.device, experts: Experts) -> Experts:
    gate_up, down = (
        ExpertMatrices(part.values.to(device), None if part.scales is None else part.scales.to(device))
        for part in (experts.gate_up, experts.down)
    )
    return replace(experts, gate_up=gate_up, down=down)


class KernelCases:
    """Every operation of `TritonOperations` equals that of `PlainOperations`."""

    @pytest.mark.parametrize("width", [1, 37, 64, 1000])
    def test_rms_norm(self, device: torch.device, dtype: torch.dtype, width: int) -> None:
        x, weight = normal(5, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
        found = KERNELS.rms_norm(x.to(device), weight.to(device), EPS)
        assert_same(found, PLAIN.rms_norm(x, weight, EPS))

    @pytest.mark.parametrize("width", [1, 37, 64, 1000])
    def test_add_rms_norm(self, device: torch.device, dtype: torch.dtype, width: int) -> None:
        # Every second row of a matrix: not contiguous, like some rows of logits.
        x, residual = normal(10, width, dtype=dtype), normal(5, width, dtype=dtype, seed=1)
        weight, summed = normal(width, dtype=dtype, seed=2), residual.to(device, copy=True)
        found = KERNELS.add_rms_norm(x.to(device)[::2], summed, weight.to(device), EPS)
        assert_same(found, PLAIN.add_rms_norm(x[::2], residual, weight, EPS))
        assert_same(summed, residual)

    @pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
    @pytest.mark.parametrize(("head_dim", "rotary_dim"), [(6, 6), (6, 2), (64, 64), (80, 80), (80, 20)])
    def test_rotate(
        self, device: torch.device, dtype: torch.dtype, norm: bool, head_dim: int, rotary_dim: int
    ) -> None:
        """Rotates three of five heads, as queries lie next to keys and values; the others are unchanged."""
        heads, weight = normal(7, 5, head_dim, dtype=dtype), None
        if norm:
            weight = normal(head_dim, dtype=dtype, seed=1)
        angles = normal(50, rotary_dim // 2, seed=2)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        positions = torch.tensor([0, 1, 2, 49, 3, 3, 17], dtype=torch.int32)
        found, expected = heads.to(device, copy=True), heads.clone()
        on_device = None if weight is None else weight.to(device)
        KERNELS.rotate(found[:, 1:4], positions.to(device), cos_sin.to(device), on_device, EPS)
        PLAIN.rotate(expected[:, 1:4], positions, cos_sin, weight, EPS)
        assert_same(found, expected, ROTATED)
        assert not torch.equal(expected[:, 1:4], heads[:, 1:4])
        assert torch.equal(found[:, [0, 4]].cpu(), heads[:, [0, 4]])

    @pytest.mark.parametrize("dims", [(16, 16), (6, 10)], ids=str)
    @pytest.mark.parametrize("block_size", [1, 3, 16])
    def test_store(
        self, device: torch.device, dtype: torch.dtype, dims: tuple[int, int], block_size: int
    ) -> None:
        """Writes slots in any order, and no others."""
        cache = LayerCache(*(normal(7, block_size, 3, dim, dtype=dtype, seed=dim) for dim in dims))
        target = LayerCache(cache.keys.to(device, copy=True), cache.values.to(device, copy=True))
        # Adjacent in one matrix, as in the fused product of query, key and value.
        together = normal(5, 3 * sum(dims), dtype=dtype, seed=2)
        slots = torch.from_numpy(np.random.default_rng(3).permutation(7 * block_size)[:5].astype(np.int32))
        for source, to, kernels in ((together, cache, PLAIN), (together.to(device), target, KERNELS)):
            keys, values = source.split([3 * dim for dim in dims], dim=1)
            keys, values = keys.unflatten(1, (3, -1)), values.unflatten(1, (3, -1))
            kernels.store(keys, values, slots.to(source.device), to)
        assert torch.equal(target.keys.cpu(), cache.keys)
        assert torch.equal(target.values.cpu(), cache.values)

    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    @pytest.mark.parametrize("width", [1, 80, 1024, 1500])
    def test_gated(
        self, device: torch.device, multiplied_dtype: torch.dtype, activation: Any, width: int
    ) -> None:
        gate_up = normal(3, 2 * width, dtype=multiplied_dtype)
        gate_up[1, :width] *= 40
        gate_up[2, 0] = -200
        found = KERNELS.gated(gate_up.to(device), activation)
        assert_same(found, PLAIN.gated(gate_up, activation))

    @pytest.mark.parametrize("width", [1, 80, 1000])
    def test_round_rows(self, device: torch.device, dtype: torch.dtype, width: int) -> None:
        x = normal(6, width, dtype=dtype) * torch.tensor([1, 1e-3, 0, 1e4, 1, 1])[:, None].to(dtype)
        codes, scales = round_rows(x.to(device))
        expected, expected_scales = round_to_float8(x)
        torch.testing.assert_close(scales.cpu(), expected_scales, rtol=1e-6, atol=0)
        found, requested = codes.cpu().float(), expected.float()
        scaled = x.float() / expected_scales
        # Interpreted, an overflowing mantissa does not increment the exponent; see triton.runtime.interpreter.
        # This affects numbers that are rounded up to a power of two, possibly subnormal ones.
        up_to_power = torch.frexp(requested.abs())[0] == 0.5
        lost = (up_to_power & (requested.abs() > scaled.abs())) | (scaled.abs() < 2**-6)
        compared = ~lost if device == CPU else torch.ones_like(lost)
        assert compared.float().mean() > 0.75
        # Division may be inexact in the last bit and ties may be rounded up: then the next code results.
        assert ((found != requested) & compared).float().mean() < 1e-2
        step = torch.exp2(torch.frexp(scaled.abs().clamp(min=2**-6))[1].float() - 4)
        assert ((found - requested).abs() <= step)[compared].all()

    @pytest.mark.parametrize(("name", "float8"), [*((name, False) for name in ROUTING), ("uneven", True)])
    def test_experts(
        self, device: torch.device, multiplied_dtype: torch.dtype, name: str, float8: bool
    ) -> None:
        routing, dtype = ROUTING[name], multiplied_dtype
        x, experts = (
            normal(len(routing.chosen), 70, dtype=dtype),
            random_experts(routing.count, dtype, float8),
        )
        weights = normal(*routing.chosen.shape, seed=3).softmax(dim=-1)
        found = KERNELS.experts(
            x.to(device),
            experts_on(device, experts),
            routing.chosen.to(device),
            weights.to(device),
            "silu",
        )
        expected = PLAIN.experts(x, experts, routing.chosen, weights, "silu")
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.cpu(), expected, **EXPERTS[dtype])

    def test_experts_with_rounded_inputs(self, device: torch.device) -> None:
        """The products of e4m3 codes, on GPUs that multiply them; on others inputs are not rounded."""
        if device != CPU and not multiplies_float8(device):
            pytest.skip("this GPU does not multiply float8")
        dtype, routing = torch.bfloat16, Routing.random(12, 2, 3)
        experts = random_experts(3, dtype, float8=True, hidden=144, width=80)
        x = normal(12, 144, dtype=dtype) * torch.logspace(-2, 2, 12)[:, None].to(dtype)
        tiles = assign_tiles(routing.chosen.to(device), 3)
        codes, scales = round_to_float8(x)
        found = torch.empty(24, 160, dtype=dtype, device=device)
        on_device = experts_on(device, experts)
        multiply_tiles(codes.to(device), scales.to(device), on_device.gate_up, tiles, found)
        rounded, chosen = codes.float() * scales, routing.chosen.flatten()
        for slot, row in enumerate(found.cpu()):
            expected = experts.gate_up[int(chosen[slot])](rounded[slot // 2][None])[0]
            # Tensor cores may keep less than float32 of a sum.
            assert (row - expected).norm() < 2**-8 * expected.norm()

    def test_a_row_of_experts_does_not_depend_on_the_batch(self, device: torch.device) -> None:
        # The first expert has two tiles.
        dtype, routing = torch.float16, Routing(torch.tensor([[0, 1], [2, 0]] * 35), 3)
        experts = random_experts(routing.count, dtype, False)
        arguments = [
            part.to(device)
            for part in (
                normal(70, 70, dtype=dtype),
                routing.chosen,
                normal(70, 2, seed=3).softmax(dim=-1),
            )
        ]
        on_device = experts_on(device, experts)

        def run_rows(rows: list[int]) -> Tensor:
            x, chosen, weights = (part[rows] for part in arguments)
            return KERNELS.experts(x, on_device, chosen, weights, "gelu_tanh")

        together = run_rows(list(range(70)))
        for rows in ([17], [69, 3], [*range(66, 70), *range(4, -1, -1)]):
            assert torch.equal(run_rows(rows), together[rows])

    @pytest.mark.parametrize("name", ATTENTION)
    def test_attention(
        self,
        device: torch.device,
        multiplied_dtype: torch.dtype,
        name: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        dtype = multiplied_dtype
        case, plan = ATTENTION[name], plan_of(ATTENTION[name])
        monkeypatch.setattr(attention_kernels, "_splits", lambda programs, device: case.splits)
        blocks = int(plan.block_tables.max()) + 1
        # Every slot has content: slots after the end of a sequence must have no effect.
        cache = LayerCache(
            normal(blocks, case.block_size, case.kv_heads, case.key_dim, dtype=dtype, seed=1),
            normal(blocks, case.block_size, case.kv_heads, case.value_dim, dtype=dtype, seed=2),
        )
        # Queries lie next to keys and values.
        queries = normal(plan.num_tokens, case.heads + 3, case.key_dim, dtype=dtype)
        options = (case.window, 1.3 * case.key_dim**-0.5, case.softcap)
        found = KERNELS.attention(
            queries.to(device)[:, : case.heads],
            LayerCache(cache.keys.to(device), cache.values.to(device)),
            step_inputs(plan, case.block_size, device, sinks=case.sinks),
            *options,
        )
        expected = PLAIN.attention(
            queries[:, : case.heads].float(),
            LayerCache(cache.keys.float(), cache.values.float()),
            step_inputs(plan, case.block_size, CPU, sinks=case.sinks),
            *options,
        )
        assert found.dtype == dtype
        torch.testing.assert_close(found.cpu().float(), expected, **ATTENDED[dtype])

    @pytest.mark.parametrize("tile_rows", [AdapterRows.FEW, AdapterRows.MANY])
    @pytest.mark.parametrize("name", ADAPTERS)
    def test_adapt(
        self, device: torch.device, multiplied_dtype: torch.dtype, name: str, tile_rows: int
    ) -> None:
        case, dtype, inputs, widths = ADAPTERS[name], multiplied_dtype, 1300, (130, 24, 1)
        slots = np.array(case.slots, np.int32)
        tiles = np.concatenate([adapter_tiles(slots, tile_rows), np.full((2, tile_rows), -1, np.int32)])
        rows = AdapterRows(torch.from_numpy(slots), torch.from_numpy(tiles))
        x, before = (
            normal(len(slots), inputs, dtype=dtype),
            normal(len(slots), sum(widths), dtype=dtype, seed=1),
        )
        found, expected = before.to(device, copy=True), before.to(torch.float32, copy=True)
        stack = adapter_stack(case, dtype, device, widths, inputs)
        KERNELS.adapt(x.to(device), found, stack, AdapterRows(rows.slots.to(device), rows.tiles.to(device)))
        wide = replace(
            stack, **{field: getattr(stack, field).float().cpu() for field in ("a", "b", "scales")}
        )
        PLAIN.adapt(x.float(), expected, replace(wide, ranks=stack.ranks.cpu()), rows)
        torch.testing.assert_close(found.cpu().float(), expected, **ADAPTED[dtype])
        unchanged = torch.isin(rows.slots, torch.tensor([-1, 3]))
        assert torch.equal(found.cpu()[unchanged], before[unchanged])
        assert torch.equal(expected != before.float(), expected_changes(case, widths))


def random_adapter(spec: DecoderSpec, rank: int, targets: Sequence[Target]) -> LoraAdapter:
    """Adapt these targets of every layer."""
    rng = np.random.default_rng(rank)

    def update(outputs: int, inputs: int) -> LowRank:
        a, b = rng.standard_normal((rank, inputs)), rng.standard_normal((outputs, rank))
        return LowRank(a.astype(np.float32) * 0.2, b.astype(np.float32) * 0.2, 0.7)

    layers = [layer_shapes(spec, layer) for layer in range(spec.num_layers)]
    return LoraAdapter(tuple({target: update(*shapes[target]) for target in targets} for shapes in layers))


def expected_changes(case: Adapters, widths: tuple[int, ...]) -> Tensor:
    """Whether each output is adapted, bool[rows, outputs]."""
    adapted = [torch.tensor(ranks) > 0 for ranks in (*case.ranks, (0, 0, 0))]
    return torch.stack([adapted[slot] for slot in case.slots]).repeat_interleave(torch.tensor(widths), dim=1)


def adapter_stack(
    case: Adapters, dtype: torch.dtype, device: torch.device, widths: tuple[int, ...], inputs: int
) -> AdapterStack:
    """Slots of a case; whatever their adapters do not define is NaN."""
    stack = AdapterStack.allocate(
        len(case.ranks) + 1, max(map(max, case.ranks)), inputs, widths, dtype, device
    )
    stack.a.fill_(torch.nan)
    stack.b.fill_(torch.nan)
    for slot, ranks in enumerate(case.ranks):
        changes = [
            Change(
                normal(rank, inputs, dtype=dtype, seed=slot * 9 + target) * inputs**-0.5,
                normal(width, rank, dtype=dtype, seed=slot * 9 + target + 3),
                0.25 * (slot + 1),
            )
            if rank
            else None
            for target, (rank, width) in enumerate(zip(ranks, widths, strict=True))
        ]
        stack.set(slot, changes)
    return stack


@contextmanager
def not_waiting(device: torch.device) -> Iterator[None]:
    """Fail if the host waits for a GPU, as it does for copies of Python scalars; no effect on a CPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def load_torch(directory: Path, **options: Any) -> TorchRunner:
    with Checkpoint(directory) as source:
        return TorchRunner.load(decoder_spec(source.config), source, RunnerOptions(**options))


def with_operations(runner: TorchRunner, operations: Operations) -> TorchRunner:
    """Return a runner with the same weights on the same device, with its own cache and without graphs."""
    return TorchRunner(runner.shard, replace(runner._decoder, operations=operations), runner.device)


def allocate(runner: TorchRunner, builder: PlanBuilder, *, graphs: bool) -> KVCache:
    """Allocate the cache. On a CPU graphs are not captured; everything else about them is the same."""
    runner.allocate_cache(builder.layout)
    cache = runner._cache
    assert cache is not None
    if not graphs:
        runner._graphs = None
    elif runner._graphs is None:
        layout, decoder = builder.layout, runner._decoder
        runner._graphs = DecodeGraphs(
            lambda inputs: decoder.forward(inputs, cache),
            layout.block_size,
            cache.padding_block,
            layout.num_blocks,
            layout.max_num_seqs,
            runner.device,
            lora_slots=decoder.adapters.slots,
        )
    return cache


# Two layers: the interpreter is slow.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral window": ("mistral", {"sliding_window": 9, "num_hidden_layers": 2}),
    "qwen3 biases": ("qwen3", {"attention_bias": True, "num_hidden_layers": 2}),
    "qwen2 experts": ("qwen2_moe", {"num_hidden_layers": 1}),
}
ATOL = 2e-4


class GraphCases:
    """Decode steps in graphs equal plain steps of `TorchRunner`."""

    @pytest.mark.parametrize("name", MODELS)
    def test_padded_decode_batch_equals_a_plain_step(self, checkpoint_factory: Factory, name: str) -> None:
        """Consecutive steps; smaller ones run in the graph of a larger one."""
        arch, overrides = MODELS[name]
        runner = load_torch(checkpoint_factory(arch, **overrides), dtype="float32")
        graphed, plain = with_operations(runner, KERNELS), with_operations(runner, PLAIN)
        builder = PlanBuilder(4, 64, seed=1)
        cache, of_plain = allocate(graphed, builder, graphs=True), allocate(plain, builder, graphs=False)
        sequences = [builder.sequence(random_tokens(length + 3, seed=length)) for length in range(1, 19, 2)]
        run(plain, builder.plan([(s, len(s.tokens) - 3) for s in sequences]))
        for layer, prefilled in zip(cache.layers, of_plain.layers, strict=True):
            layer.keys.copy_(prefilled.keys)
            layer.values.copy_(prefilled.values)
        for first, count, offset in ((0, 3, 0), (8, 1, -3), (0, 9, 0), (4, 3, -1)):
            plan = builder.plan([(s, 1) for s in sequences[first : first + count]])
            if offset:
                plan = plan.with_part(RotaryPlan(np.full((3, count), offset, np.int32)))
            assert graphed._graphs is not None and graphed._graphs.fits(plan)
            found = run(graphed, plan)
            assert found.shape == (count, runner.spec.vocab_size)
            np.testing.assert_allclose(found, run(plain, plan), atol=ATOL)

    def test_decodes_with_adapters_equal_plain_steps(self, checkpoint_factory: Factory) -> None:
        """Adapters of several ranks, without some targets, in batches that change; some batches have none."""
        directory = checkpoint_factory("llama", num_hidden_layers=2)
        runner = load_torch(directory, dtype="float32", lora_slots=3, max_lora_rank=20)
        graphed, plain = with_operations(runner, KERNELS), with_operations(runner, PLAIN)
        for slot, (rank, targets) in enumerate(((20, TARGETS), (3, ("query", "value")), (1, ("up", "down")))):
            runner.set_adapter(slot, runner.pack_adapter(random_adapter(runner.spec, rank, targets)))
        builder = PlanBuilder(4, 64, seed=1)
        cache, of_plain = allocate(graphed, builder, graphs=True), allocate(plain, builder, graphs=False)
        sequences = [builder.sequence(random_tokens(length + 4, seed=length)) for length in range(3, 8)]
        run(plain, builder.plan([(s, len(s.tokens) - 4) for s in sequences]))
        for layer, prefilled in zip(cache.layers, of_plain.layers, strict=True):
            layer.keys.copy_(prefilled.keys)
            layer.values.copy_(prefilled.values)
        for slots in ([0, 1, -1, 2, 0], [2, 1, 0, -1], [-1, 2]):
            plan = builder.plan([(s, 1) for s in sequences[: len(slots)]])
            adapted = plan.with_part(LoraPlan(np.array(slots, np.int32)))
            assert graphed._graphs is not None and graphed._graphs.fits(adapted)
            without = run(graphed, plan)
            found = run(graphed, adapted)
            np.testing.assert_allclose(found, run(plain, adapted), atol=ATOL)
            changed = abs(found - without).max(axis=1) > 0.01
            assert changed[: len(slots)].tolist() == [slot >= 0 for slot in slots]

    @pytest.mark.parametrize("graphs", [False, True])
    def test_a_step_reads_the_tokens_of_the_previous_step(
        self, checkpoint_factory: Factory, graphs: bool
    ) -> None:
        """Steps are launched without waiting, with sequences in a different order each time."""
        loaded = load_torch(checkpoint_factory("llama"), dtype="float32")
        builder, runner = PlanBuilder(4, 64, seed=3), with_operations(loaded, KERNELS)
        allocate(runner, builder, graphs=graphs)
        sequences = [builder.sequence([*random_tokens(5 + i, seed=i), 0, 0]) for i in range(3)]
        greedy = SamplingBatch.of([(0.0, 0, 1.0, 0.0, 0.0)] * 3)
        rows = np.cumsum([5, 6, 7]) - 1
        prompts = builder.plan([(s, len(s.tokens) - 2) for s in sequences], rows=rows.tolist())
        order = [2, 0, 1]
        with not_waiting(runner.device):
            first = runner.launch(prompts).sample(greedy)
            for row, i in enumerate(order):
                sequences[i].tokens[-2] = -1 - i
                sequences[i].tokens[-1] = -1 - row
            second = runner.launch(builder.plan([(sequences[i], 1) for i in order])).sample(greedy)
            third = runner.launch(builder.plan([(sequences[i], 1) for i in order])).sample(greedy)
        tokens = [launched.wait().tolist() for launched in (first, second, third)]
        for row, i in enumerate(order):
            known = builder.sequence([*random_tokens(5 + i, seed=i), tokens[0][i], tokens[1][row]])
            logits = run(runner, builder.plan([(known, len(known.tokens))], rows=[4 + i, 5 + i, 6 + i]))
            assert logits.argmax(axis=1).tolist() == [tokens[0][i], tokens[1][row], tokens[2][row]]

    def test_padding_writes_only_the_padding_block(self, checkpoint_factory: Factory) -> None:
        directory = checkpoint_factory("llama", num_hidden_layers=2)
        runner = with_operations(load_torch(directory, dtype="float32"), KERNELS)
        builder = PlanBuilder(4, 16, seed=2)
        cache = allocate(runner, builder, graphs=True)
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        sequences = [builder.sequence(random_tokens(9, seed=i)) for i in range(5)]
        for sequence in sequences:
            sequence.num_computed = 7
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        plan = builder.plan([(s, 1) for s in sequences])  # padded to 8
        runner.step(plan)
        own = cache.padding_block * 4
        for layer, old in zip(cache.layers, before, strict=True):
            for now, then in zip((layer.keys, layer.values), old, strict=True):
                changed = (now != then).flatten(0, 1).flatten(1).any(dim=1).cpu().numpy()
                assert set(np.flatnonzero(changed[:own])) == set(plan.slots(4))
                assert changed[own:].any()


class SamplingCases:
    """Tokens sampled on a device equal those of numpy."""

    device_type = "cpu"

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    )
    @given(
        seed=st.integers(0, 10_000), rows=st.integers(1, 40), spread=st.sampled_from([0.1, 1.0, 5.0, 40.0])
    )
    def test_tokens_equal_numpy(self, seed: int, rows: int, spread: float) -> None:
        rng = np.random.default_rng(seed)
        logits = (rng.standard_normal((rows, 384)) * spread).astype(np.float32)
        draws = random_draws(rng, rows)
        expected, found = choose(logits, draws), self.choose(logits, draws)
        assert found.dtype == np.int32
        assert (found == expected).sum() >= rows - 2
        assert_neighbours(found, expected, logits, draws, 1e-3)

    @pytest.mark.parametrize("fixed", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {}], ids=str)
    def test_equal_logits_are_ordered_by_token_id(self, fixed: dict[str, float]) -> None:
        rng = np.random.default_rng(1)
        logits = np.zeros((64, 384), np.float32)
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        draws = random_draws(rng, 64, **{**neutral, **fixed})
        np.testing.assert_array_equal(self.choose(logits, draws), choose(logits, draws))
        greedy = random_draws(rng, 64, temperature=0.0)
        assert self.choose(logits, greedy).tolist() == [0] * 64

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("top_p", [0.7, 1.0])
    def test_nan_rows_give_invalid_tokens(self, temperature: float, top_p: float) -> None:
        rng = np.random.default_rng(2)
        logits = rng.standard_normal((7, 384)).astype(np.float32)
        logits[0, 0] = logits[1, 383] = logits[2, 33] = np.nan
        logits[3] = np.nan
        logits[4] = -np.inf
        logits[4, 9] = 1.0
        draws = random_draws(rng, 7, temperature=temperature, top_k=0, top_p=top_p, min_p=0.0)
        found = self.choose(logits, draws)
        assert found[:4].tolist() == [INVALID_TOKEN] * 4
        assert found[4] == 9
        np.testing.assert_array_equal(found[5:], choose(logits, draws)[5:])

    def test_greedy_and_random_rows_share_a_batch(self) -> None:
        rng = np.random.default_rng(3)
        logits = rng.standard_normal((40, 384)).astype(np.float32)
        draws = random_draws(rng, 40, top_k=0, top_p=1.0, min_p=0.0)
        draws.temperature[::2] = 0
        found = self.choose(logits, draws)
        np.testing.assert_array_equal(found[::2], logits[::2].argmax(axis=1))
        np.testing.assert_array_equal(found, choose(logits, draws))

    @pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.01}], ids=str)
    def test_rows_with_many_equal_logits_equal_numpy(self, filters: dict[str, float]) -> None:
        """Logits of bfloat16 are often equal at the edge of a filter."""
        rng = np.random.default_rng(4)
        logits = (np.round(rng.standard_normal((12, 384)) * 8) / 4).astype(np.float32)
        draws = random_draws(
            rng, 12, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, **filters}
        )
        np.testing.assert_array_equal(self.choose(logits, draws), choose(logits, draws))

    def choose(self, logits: np.ndarray, draws: SamplingBatch) -> np.ndarray:
        on_device = torch.from_numpy(logits).to(self.device_type)
        with not_waiting(on_device.device):
            tokens = choose_on_device(on_device, draws)
        return tokens.cpu().numpy()


class DeviceLogitsCases:
    """Reads and writes behave like the underlying array."""

    @pytest.mark.parametrize("rows", [0, -1, slice(None), slice(1, 3), [2, 0, 2], []], ids=str)
    def test_indexing_returns_a_copy(self, device: torch.device, rows: Any) -> None:
        array = normal(4, 7).numpy()
        logits = DeviceLogits(torch.from_numpy(array.copy()).to(device))
        assert len(logits) == 4
        found = logits[rows]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, array[rows])
        found[...] = 5
        np.testing.assert_array_equal(logits[:], array)
        np.testing.assert_array_equal(np.asarray(logits), array)

    def test_writing_a_row_changes_no_other(self, device: torch.device) -> None:
        array = normal(4, 7).numpy()
        with torch.inference_mode():  # as in a step
            logits = DeviceLogits(torch.from_numpy(array.copy()).to(device) * 1)
        row = logits[2]
        row[3:] = -np.inf
        logits[2] = row
        array[2, 3:] = -np.inf
        np.testing.assert_array_equal(logits[:], array)


class ScoringCases:
    """Adjusted logits, tokens and log probabilities on a device equal those of numpy."""

    def test_adjustments_and_scores_equal_numpy(self, device: torch.device) -> None:
        rng = np.random.default_rng(8)
        states = [_sampling_state(**params) for params in _ADJUSTED]
        for _ in range(6):
            # Rounded, so that several logits are equal.
            logits = (np.round(rng.standard_normal((len(states), 96)) * 8) / 4).astype(np.float32)
            draws, adjustments = sampling_batch(states), LogitAdjustments.of(states)
            wanted = ScoreRequest.of(states)
            on_device = torch.from_numpy(logits.copy()).to(device)
            with not_waiting(device):
                launched = LaunchedDeviceLogits(on_device, lambda tokens: None).sample(
                    draws, adjustments, wanted
                )
            tokens, expected = sample_and_score(logits, draws, adjustments, wanted)
            np.testing.assert_array_equal(launched.wait(), tokens)
            np.testing.assert_array_equal(on_device.cpu().numpy(), logits)
            found = launched.scores()
            assert expected is not None and found is not None
            for field in fields(TokenScores):
                mine, theirs = getattr(found, field.name), getattr(expected, field.name)
                assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), field.name
                np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6, err_msg=field.name)
            for state, token in zip(states, tokens.tolist(), strict=True):
                state.record(token)


_ADJUSTED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "repetition_penalty": 1.4, "logprobs": 2},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logprobs": 5},
    {"repetition_penalty": 0.7, "frequency_penalty": -0.4, "logit_bias": {3: 2.5, 95: -100.0}},
    {"temperature": 0.7, "min_tokens": 3, "top_k": 7},
    {"temperature": 2.0, "allowed_token_ids": (1, 5, 80, 5), "logprobs": 0},
    {"temperature": 2.0, "no_repeat_ngram_size": 1},
    {"embedding_bias": np.linspace(-3, 3, 96, dtype=np.float32).tobytes(), "logprobs": -1},
    {"temperature": 1.0, "normalize_logprobs": True, "logprobs": 3, "top_p": 0.9, "presence_penalty": 0.2},
    {"return_generation_logits": True},
]


def _sampling_state(**params: Any) -> SamplingState:
    sampling = SamplingParams(**{"temperature": 0.0, "seed": 4, **params})
    request = EngineRequest(
        request_id="",
        prompt_token_ids=[7, 9, 7],
        sampling=sampling,
        max_tokens=50,
        end_token_ids=tuple(range(0, 96, 3)),
        bad_words=((11,), (9, 7), (12, 13)),
    )
    return SamplingState.create(request, [7, 9, 7])
