"""Families other than Llama in the whole engine: tokens equal transformers, and engine directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracle import greedy
from runners.model_cases import MODELS

from neso.engine.client.llm import LLM
from neso.engine.load.build import build_engine, build_float8
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
from neso.generation import SamplingParams

Factory = Callable[..., Path]
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
_SHARED = list(range(40, 73))
PROMPTS = [[7, 8, 9], [*range(20, 60)], [*_SHARED, 7], [*_SHARED, 8, 9], [100]]

# One of each family.
FAMILIES = dict(reversed(MODELS.values()))


def tokens(model: Path, runner: str = "native", **options: Any) -> list[list[int]]:
    # One thread: several would wait for each other, which is slow on a busy machine.
    llm = LLM(model, runner=runner, num_threads=1, **options)
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY, progress=False)]


@pytest.mark.parametrize("arch", FAMILIES)
def test_tokens_equal_transformers(checkpoint_factory: Factory, arch: str) -> None:
    """With chunked prefill, shared prefixes, and a cache so small that sequences are preempted."""
    directory = checkpoint_factory(arch, **FAMILIES[arch])
    expected = greedy(directory, PROMPTS, MAX_TOKENS)
    for runner in ("reference", "native", "torch"):
        options = {"dtype": "float32", "max_prefill_chunk": 7, "block_size": 4, "num_blocks": 24}
        assert tokens(directory, runner, **options) == expected, runner


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("arch", ["gemma3_text", "phi3", "gpt2", "qwen2_moe"])
def test_engine_directory_tokens_equal_the_checkpoint(
    checkpoint_factory: Factory, tmp_path: Path, arch: str, quantization: Any
) -> None:
    checkpoint = checkpoint_factory(arch, **FAMILIES[arch])
    seen: list[tuple[int, int]] = []
    options = RunnerOptions(quantization=quantization)
    build_engine(checkpoint, tmp_path / "engine", options, progress=lambda *done: seen.append(done))
    assert seen[-1][0] == seen[-1][1] == len(seen)
    plain = {} if quantization is None else {"quantization": quantization}
    assert tokens(tmp_path / "engine") == tokens(checkpoint, **plain)


@pytest.mark.parametrize("arch", ["phi3", "mixtral", "gemma2"])
def test_float8_checkpoints(checkpoint_factory: Factory, tmp_path: Path, arch: str) -> None:
    """The torch runner's tokens equal those of the dequantized checkpoint, rounded in the same way."""
    checkpoint = checkpoint_factory(arch, **{**FAMILIES[arch], "dtype": "bfloat16"})
    build_float8(checkpoint, tmp_path / "fp8")
    assert tokens(tmp_path / "fp8", "torch") == tokens(checkpoint, "torch", quantization="fp8")


def test_float8_checkpoints_have_outputs_first(checkpoint_factory: Factory, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match=r"\[inputs, outputs\]"):
        build_float8(checkpoint_factory("gpt2"), tmp_path / "fp8")
