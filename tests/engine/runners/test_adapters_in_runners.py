"""Adapters in a batch on every CPU runner: the logits of each row equal peft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_oracle
from plan_builder import PlanBuilder, oracle_logits, random_tokens, run

import neso._native as _native
from neso.engine.core.step_plan import StepPlan
from neso.engine.lora.adapter import LoraAdapter, LoraPlan
from neso.engine.lora.peft_checkpoint import read_peft_checkpoint
from neso.engine.runners.base import Runner, SpecRunner
from neso.engine.runners.registry import runner_class
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint

peft = pytest.importorskip("peft")

ISAS = ["generic", "avx2", "avx512", "avx512_bf16", "amx", "neon_dot", "neon_bf16"]
RUNNERS = ["reference", "torch", *(f"native-{isa}" for isa in ISAS)]
ATTENTION, ALL = (
    ["q_proj", "v_proj"],
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)
# Odd ranks, ranks that do not fill a vector, and adapters without some of the matrices.
OPTIONS: list[dict[str, Any]] = [
    {"r": 3, "target_modules": ALL},
    {"r": 33, "target_modules": ATTENTION, "use_rslora": True},
    {"r": 16, "target_modules": ["up_proj"], "layers_to_transform": [1]},
]
LENGTHS = (1, 9, 40)


class Case:
    """A checkpoint, three adapters, and reference logits of some texts by adapter (-1: none)."""

    def __init__(self, base: Path, root: Path, dtype: str) -> None:
        self.base, self.dtype = base, dtype
        self.texts = [random_tokens(length, seed=length) for length in LENGTHS]
        with Checkpoint(base) as checkpoint:
            spec = decoder_spec(checkpoint.config)
        self.adapters: list[LoraAdapter] = []
        self.expected = {-1: [oracle_logits(load_oracle(base), text) for text in self.texts]}
        for number, options in enumerate(OPTIONS):
            torch.manual_seed(number)
            config = peft.LoraConfig(lora_alpha=8, init_lora_weights=False, **options)
            model = peft.get_peft_model(load_oracle(base), config).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_" in name:
                        parameter.copy_((torch.randn_like(parameter) * 0.15).bfloat16())
            model.save_pretrained(root / str(number))
            self.adapters.append(read_peft_checkpoint(root / str(number), spec, max_rank=64))
            self.expected[number] = [oracle_logits(model, text) for text in self.texts]

    def load(self, runner: str) -> SpecRunner:
        with Checkpoint(self.base) as checkpoint:
            spec = decoder_spec(checkpoint.config)
            options = RunnerOptions(self.dtype, num_threads=3, lora_slots=3, max_lora_rank=33)  # type: ignore[arg-type]
            loaded = runner_class(runner.partition("-")[0]).load(spec, checkpoint, options)
        for slot, adapter in enumerate(self.adapters):
            loaded.set_adapter(slot, loaded.pack_adapter(adapter))
        return loaded


@pytest.fixture(scope="module")
def case(checkpoint_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(checkpoint_factory("llama"), tmp_path_factory.mktemp("float32"), "float32")


@pytest.fixture(scope="module")
def narrow_case(checkpoint_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Case:
    base = checkpoint_factory("qwen2", dtype="bfloat16", num_hidden_layers=2)
    return Case(base, tmp_path_factory.mktemp("bfloat16"), "bfloat16")


def choose_isa(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    isa = runner.partition("-")[2]
    if isa and isa not in _native.supported_isas():
        pytest.skip(f"this CPU has no {isa}")
    if isa:
        monkeypatch.setenv("NESO_ISA", isa)


def with_slots(plan: StepPlan, slots: list[int]) -> StepPlan:
    return plan.with_part(LoraPlan(np.array(slots, np.int32)))


def mixed_logits(case: Case, runner: Runner, chunks: bool) -> dict[tuple[int, int], np.ndarray]:
    """Return logits by (adapter, text) of a shuffled batch of all texts with all adapters and none."""
    builder = PlanBuilder()
    runner.allocate_cache(builder.layout)
    pairs = [(slot, text) for text in range(len(LENGTHS)) for slot in (1, -1, 0, 2)]
    sequences = {pair: builder.sequence(case.texts[pair[1]]) for pair in pairs}
    found: dict[tuple[int, int], list[np.ndarray]] = {pair: [] for pair in pairs}
    rng = np.random.default_rng(0)
    while left := [p for p in pairs if sequences[p].num_computed < len(sequences[p].tokens)]:
        rng.shuffle(left)
        rest = [len(sequences[p].tokens) - sequences[p].num_computed for p in left]
        counts = [int(rng.integers(1, n + 1)) if chunks else n for n in rest]
        advances = [(sequences[p], n) for p, n in zip(left, counts, strict=True)]
        logits = run(runner, with_slots(builder.plan(advances), [slot for slot, _ in left]))
        for pair, part in zip(left, np.split(logits, np.cumsum(counts)[:-1]), strict=True):
            found[pair].append(part)
    return {pair: np.concatenate(parts) for pair, parts in found.items()}


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("runner", RUNNERS)
def test_logits_equal_peft(case: Case, runner: str, chunks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_isa(runner, monkeypatch)
    for (slot, text), logits in mixed_logits(case, case.load(runner), chunks).items():
        np.testing.assert_allclose(logits, case.expected[slot][text], atol=3e-4)


@pytest.mark.parametrize("runner", RUNNERS[1:])
def test_bfloat16(narrow_case: Case, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding changes the logits far less than an adapter."""
    choose_isa(runner, monkeypatch)
    for (slot, text), logits in mixed_logits(narrow_case, narrow_case.load(runner), True).items():
        expected = narrow_case.expected[slot][text]
        other = narrow_case.expected[-1 if slot >= 0 else 0][text]
        assert abs(logits - expected).mean() < 0.25 * abs(other - expected).mean()


@pytest.mark.parametrize("runner", ["reference", "torch", "native"])
def test_slots_are_reused(case: Case, runner: str) -> None:
    loaded = case.load(runner)
    loaded.allocate_cache(PlanBuilder().layout)
    text = case.texts[2]
    for slot, number in ((0, 2), (2, 1), (0, 0)):
        loaded.set_adapter(slot, None)
        loaded.set_adapter(slot, loaded.pack_adapter(case.adapters[number]))
        builder = PlanBuilder()
        plan = builder.plan([(builder.sequence(text), len(text))], rows=[len(text) - 1])
        logits = run(loaded, with_slots(plan, [slot]))
        np.testing.assert_allclose(logits[0], case.expected[number][2][-1], atol=3e-4)
        without = run(loaded, plan)
        np.testing.assert_allclose(without[0], case.expected[-1][2][-1], atol=3e-4)


def test_torch_runner_rejects_slots_and_ranks_that_it_was_not_loaded_for(case: Case) -> None:
    loaded = case.load("torch")
    with pytest.raises(ValueError, match="adapter slot 3: the runner was loaded for 3 adapters"):
        loaded.set_adapter(3, loaded.pack_adapter(case.adapters[0]))
    wide = [
        {t: replace(c, a=np.repeat(c.a, 12, 0), b=np.repeat(c.b, 12, 1)) for t, c in layer.items()}
        for layer in case.adapters[0].layers
    ]
    with pytest.raises(ValueError, match="adapter rank 36: the runner was loaded for ranks up to 33"):
        loaded.set_adapter(0, loaded.pack_adapter(LoraAdapter(tuple(wide))))


def test_native_decoder_rejects_mismatched_adapters(case: Case) -> None:
    loaded = case.load("native")
    loaded.allocate_cache(PlanBuilder().layout)
    builder = PlanBuilder()
    plan = builder.plan([(builder.sequence([7, 8]), 2)])
    with pytest.raises(ValueError, match="a slot has no adapter"):
        loaded.step(with_slots(plan, [3]))
    adapter = _native.Adapter("f32", 3)
    zeros = np.zeros(2 * 64 * 4, np.uint8)
    with pytest.raises(ValueError, match="ranks must be even"):
        adapter.add_product(0, 0, 48, zeros, np.ones(3, np.float32))
    with pytest.raises(ValueError, match="padded row"):
        adapter.add_product(0, 0, 65, zeros, np.ones(2, np.float32))
    with pytest.raises(ValueError, match="no such product"):
        adapter.add_product(3, 0, 48, zeros, np.ones(2, np.float32))
    adapter.add_product(0, 0, 48, zeros, np.ones(2, np.float32))
    with pytest.raises(ValueError, match="do not fit"):
        adapter.add_part(0, 0, 0, 16, 4, zeros)
    with pytest.raises(ValueError, match="whole panels"):
        adapter.add_part(0, 0, 0, 17, 2, zeros)
    with pytest.raises(ValueError, match="adapters are f32 or bf16"):
        _native.Adapter("int8", 3)
