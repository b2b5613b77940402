"""Every CPU runner against transformers, and against itself with other splits into steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_oracle, rewrite_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_builder import PlanBuilder, oracle_logits, random_tokens, run, run_in_chunks

import neso._native as _native
from neso.engine.runners import registry
from neso.engine.runners.base import Runner
from neso.engine.runners.native.runner import NativeRunner
from neso.engine.runners.reference.runner import ReferenceRunner
from neso.engine.runners.registry import UnknownRunner, runner_class
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint
from neso.engine.weights.source import CheckpointError

Factory = Callable[..., Path]
Load = Callable[[Path], Runner]

ISAS = ["generic", "avx2", "avx512", "avx512_bf16", "amx", "neon_dot", "neon_bf16"]

# Logits span a few units; float32 sums in a different order differ by a few 1e-5.
ATOL = 2e-4

WINDOWS = {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1, "head_dim": 6}),
    "llama all kv heads": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied, windows": ("qwen2", {"tie_word_embeddings": True, **WINDOWS}),
    "qwen3": ("qwen3", {}),
    "qwen3 biases, windows": ("qwen3", {"attention_bias": True, **WINDOWS}),
}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


# Beyond 32 tokens every kind of scaling differs from plain rotation.
SCALED = {
    "linear": rope("linear", factor=2.0),
    "llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=32),
    "yarn mscale": rope(
        "yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.8, mscale_all_dim=0.3, beta_fast=8.0
    ),
}


@lru_cache
def load_runner(name: str, directory: Path) -> Runner:
    found = runner_class(name.partition("-")[0])
    with Checkpoint(directory) as checkpoint:
        spec = decoder_spec(checkpoint.config)
        # Possibly more threads than cores.
        return found.load(spec, checkpoint, RunnerOptions(dtype="float32", num_threads=3))


@pytest.fixture(params=["reference", "torch", *(f"native-{isa}" for isa in ISAS)])
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Load:
    """`load(directory)` returns the runner in float32; the native one with each instruction set."""
    name, _, isa = request.param.partition("-")
    if name == "native":
        if isa not in _native.supported_isas():
            pytest.skip(f"this CPU has no {isa}")
        monkeypatch.setenv("NESO_ISA", isa)
    return partial(load_runner, request.param)


oracle = lru_cache(load_oracle)


def new_builder(runner: Runner, block_size: int = 4, num_blocks: int = 256, seed: int = 0) -> PlanBuilder:
    """Return a plan builder and a cache; the reference cache is filled with NaN to detect reads of unwritten slots."""
    builder = PlanBuilder(block_size, num_blocks, seed)
    runner.allocate_cache(builder.layout)
    if isinstance(runner, ReferenceRunner):
        fill_with_nan(runner)
    return builder


def fill_with_nan(runner: ReferenceRunner) -> None:
    assert runner._cache is not None
    for layer in runner._cache._layers:
        layer[:] = np.nan


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(load: Load, checkpoint_factory: Factory, name: str) -> None:
    arch, overrides = MODELS[name]
    directory = checkpoint_factory(arch, **overrides)
    runner, tokens = load(directory), random_tokens(45)
    expected = oracle_logits(oracle(directory), tokens)
    builder = new_builder(runner)
    for sizes in ([45], [1] * 45, [7, 1, 1, 30, 6]):
        logits = run_in_chunks(runner, builder, tokens, sizes)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, expected, atol=ATOL)


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("old_form", [False, True])
def test_rotary_scaling_beyond_the_original_length(
    load: Load, checkpoint_factory: Factory, tmp_path: Path, kind: str, old_form: bool
) -> None:
    directory = checkpoint_factory("llama", **SCALED[kind])
    tokens = random_tokens(90)
    expected = oracle_logits(oracle(directory), tokens)
    if old_form:
        import shutil

        directory = shutil.copytree(directory, tmp_path / "old")
        scaling = {k: v for k, v in SCALED[kind]["rope_parameters"].items() if k != "rope_theta"}
        rewrite_config(directory, remove=("rope_parameters",), rope_theta=10000.0, rope_scaling=scaling)
    runner = load(directory)
    logits = run_in_chunks(runner, new_builder(runner), tokens, [20, 40, 1, 1, 28])
    np.testing.assert_allclose(logits, expected, atol=ATOL)


def test_dynamic_scaling_equals_transformers_for_prompt_and_generated_tokens(
    load: Load,
    checkpoint_factory: Factory,
) -> None:
    directory = checkpoint_factory("llama", **rope("dynamic", factor=3.0), max_position_embeddings=32)
    tokens, prompt = random_tokens(70), 30
    model, past, expected = oracle(directory), None, []
    with torch.no_grad():
        for piece in (tokens[:prompt], *([token] for token in tokens[prompt:])):
            output = model(torch.tensor([piece]), past_key_values=past, use_cache=True)
            past = output.past_key_values
            expected.append(output.logits[0].numpy())
    runner = load(directory)
    assert runner.spec.max_position == 96
    for sizes in ([prompt] + [1] * 40, [70], [12, 40, 18]):
        logits = run_in_chunks(runner, new_builder(runner), tokens, sizes)
        np.testing.assert_allclose(logits, np.concatenate(expected), atol=ATOL)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_shards(load: Load, checkpoint_factory: Factory, dtype: str) -> None:
    directory = checkpoint_factory("qwen2", dtype=dtype, max_shard_size="40KB")
    runner, tokens = load(directory), random_tokens(20)
    logits = run_in_chunks(runner, new_builder(runner), tokens, [20])
    np.testing.assert_allclose(logits, oracle_logits(oracle(directory), tokens), atol=ATOL)


@pytest.mark.parametrize("name", ["llama", "mistral window", "qwen3 biases, windows"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_mixed_batches(load: Load, checkpoint_factory: Factory, name: str, block_size: int) -> None:
    """A batch of prefills and decodes of all lengths, with changing members and order."""
    arch, overrides = MODELS[name]
    directory = checkpoint_factory(arch, **overrides)
    runner, random = load(directory), np.random.default_rng(1)
    builder = new_builder(runner, block_size, 1024, seed=2)
    sequences = [builder.sequence(random_tokens(length, seed=length)) for length in (3, 17, 25, 40, 41, 60)]
    expected = {s.sequence_id: oracle_logits(oracle(directory), s.tokens) for s in sequences}
    while unfinished := [s for s in sequences if s.num_computed < len(s.tokens)]:
        random.shuffle(unfinished)
        advances = []
        for sequence in unfinished[: random.integers(1, len(unfinished) + 1)]:
            left = len(sequence.tokens) - sequence.num_computed
            advances.append((sequence, 1 if random.random() < 0.6 else int(random.integers(1, left + 1))))
        requested = [
            expected[s.sequence_id][s.num_computed : s.num_computed + count] for s, count in advances
        ]
        np.testing.assert_allclose(run(runner, builder.plan(advances)), np.concatenate(requested), atol=ATOL)


def test_prefill_longer_than_a_query_tile(load: Load, checkpoint_factory: Factory) -> None:
    directory = checkpoint_factory("mistral", sliding_window=37)
    runner, tokens = load(directory), random_tokens(300)
    logits = run_in_chunks(runner, new_builder(runner, 16, 64), tokens, [280, 1, 19])
    np.testing.assert_allclose(logits, oracle_logits(oracle(directory), tokens), atol=ATOL)


def test_large_decode_batches_are_split_into_groups(load: Load, llama_checkpoint: Path) -> None:
    runner = load(llama_checkpoint)
    builder = new_builder(runner, 16, 512)
    sequences = [builder.sequence(random_tokens(length, seed=length)) for length in range(2, 300, 9)]
    for sequence in sequences:
        runner.step(builder.plan([(sequence, len(sequence.tokens) - 1)], rows=[]))
    logits = run(runner, builder.plan([(sequence, 1) for sequence in sequences]))
    for row, sequence in list(zip(logits, sequences, strict=True))[::8]:
        expected = oracle_logits(oracle(llama_checkpoint), sequence.tokens)[-1]
        np.testing.assert_allclose(row, expected, atol=ATOL)


def test_blocks_outside_the_window_are_not_read(load: Load, checkpoint_factory: Factory) -> None:
    directory = checkpoint_factory("mistral", sliding_window=9)
    runner, tokens = load(directory), random_tokens(30)
    builder = new_builder(runner)
    sequence = builder.sequence(tokens)
    runner.step(builder.plan([(sequence, 29)]))
    sequence.blocks[:5] = [-1] * 5  # positions 0 to 19; the last token sees 21 to 29
    logits = run(runner, builder.plan([(sequence, 1)]))
    np.testing.assert_allclose(logits[0], oracle_logits(oracle(directory), tokens)[-1], atol=ATOL)


def test_forks_copy_the_last_block(load: Load, llama_checkpoint: Path) -> None:
    runner = load(llama_checkpoint)
    builder = new_builder(runner)
    prompt = random_tokens(10)
    parent = builder.sequence([*prompt, 20, 21, 22])
    runner.step(builder.plan([(parent, 10)]))
    child, copies = builder.fork(parent, [*prompt, 30, 31, 32])
    assert len(copies) == 1
    logits = [run(runner, builder.plan([(parent, 1), (child, 1)], copies=copies))]
    logits += [run(runner, builder.plan([(child, 1), (parent, 1)]))[::-1] for _ in range(2)]
    for index, sequence in enumerate((parent, child)):
        expected = oracle_logits(oracle(llama_checkpoint), sequence.tokens)[10:]
        np.testing.assert_allclose([step[index] for step in logits], expected, atol=ATOL)


def test_only_requested_rows_are_returned(load: Load, llama_checkpoint: Path) -> None:
    runner = load(llama_checkpoint)
    tokens = random_tokens(12)
    every = run_in_chunks(runner, new_builder(runner), tokens, [12])
    builder = new_builder(runner)
    rows = [11, 0, 5, 5]
    some = run(runner, builder.plan([(builder.sequence(tokens), 12)], rows=rows))
    np.testing.assert_allclose(some, every[rows], atol=1e-5)
    none = run(runner, builder.plan([(builder.sequence(tokens), 12)], rows=[]))
    assert none.shape == (0, runner.spec.vocab_size)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_logits_do_not_depend_on_the_split_into_steps(
    load: Load, checkpoint_factory: Factory, data: st.DataObject
) -> None:
    arch, overrides = MODELS[data.draw(st.sampled_from(["llama", "mistral window", "qwen3"]))]
    runner = load(checkpoint_factory(arch, **overrides))
    length = data.draw(st.integers(2, 40))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1))))
    sizes = np.diff([0, *cuts, length]).tolist()
    tokens = random_tokens(length, seed=data.draw(st.integers(0, 5)))
    block_size = data.draw(st.integers(1, 9))
    whole = run_in_chunks(runner, new_builder(runner, block_size), tokens, [length])
    split = run_in_chunks(runner, new_builder(runner, block_size, seed=1), tokens, sizes)
    np.testing.assert_allclose(split, whole, atol=ATOL)


def test_step_before_allocate_cache(load: Load, llama_checkpoint: Path) -> None:
    with Checkpoint(llama_checkpoint) as checkpoint:
        runner = type(load(llama_checkpoint)).load(decoder_spec(checkpoint.config), checkpoint)
    builder = PlanBuilder()
    with pytest.raises(RuntimeError, match="allocate_cache"):
        runner.step(builder.plan([(builder.sequence([7]), 1)]))


@pytest.mark.parametrize(
    ("overrides", "tensor"),
    [
        ({"attention_bias": True}, r"q_proj\.bias"),
        ({"num_hidden_layers": 4}, r"layers\.3\."),
        ({"intermediate_size": 81}, r"gate_proj\.weight.*\[80, 48\].*\[81, 48\]"),
        ({"vocab_size": 400}, r"embed_tokens\.weight"),
    ],
)
def test_weights_of_another_shape_are_rejected(
    load: Load, llama_checkpoint: Path, overrides: dict[str, Any], tensor: str
) -> None:
    with Checkpoint(llama_checkpoint) as checkpoint:
        spec = decoder_spec({**checkpoint.config, **overrides})
        with pytest.raises(CheckpointError, match=tensor):
            ReferenceRunner.load(spec, checkpoint)


def test_unknown_names() -> None:
    assert runner_class("auto") is NativeRunner
    assert runner_class("reference") is ReferenceRunner
    with pytest.raises(UnknownRunner, match="reference"):
        runner_class("gpu")


def test_auto_selects_the_first_importable_runner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = {"absent": ("neso.engine.runners.absent", "Absent")}
    monkeypatch.setattr(registry, "RUNNERS", {**missing, "reference": registry.RUNNERS["reference"]})
    assert runner_class("auto") is ReferenceRunner
    assert "the runner absent cannot run here" in caplog.text
    with pytest.raises(UnknownRunner, match="absent"):
        runner_class("absent")
