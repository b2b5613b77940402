"""Every model family on several ranks, as threads of one process: logits equal those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from parallel.thread_ranks import ThreadRanks
from runners.model_cases import MODELS
from runners.plan_builder import mixed_batch

from neso.engine.runners.registry import runner_class
from neso.engine.runners.runner_options import Quantization, RunnerOptions
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import open_source

Factory = Callable[..., Path]
CASES = {"llama": ("llama", {}), "qwen3": ("qwen3", {"attention_bias": True}), **MODELS}
RUNNERS = ["reference", "native", "torch"]
ATOL = 2e-4


def load(
    directory: Path,
    runner: str,
    tensor_parallel: int,
    pipeline_parallel: int,
    quantization: Quantization | None = None,
) -> ThreadRanks:
    with open_source(directory) as source:
        spec = decoder_spec(source.config)
        options = RunnerOptions(
            dtype="float32", quantization=quantization, num_threads=1, lora_slots=2, max_lora_rank=3
        )
        return ThreadRanks.open(
            runner_class(runner), spec, source, tensor_parallel, pipeline_parallel, options
        )


@cache
def on_one_rank(directory: Path, runner: str) -> np.ndarray:
    return mixed_batch(load(directory, runner, 1, 1))


def check(directory: Path, runner: str, layout: tuple[int, int]) -> None:
    found = mixed_batch(load(directory, runner, *layout))
    np.testing.assert_allclose(found, on_one_rank(directory, runner), atol=ATOL)


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=["tp2", "pp2"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_logits_equal_one_rank(
    checkpoint_factory: Factory, runner: str, name: str, layout: tuple[int, int]
) -> None:
    """A batch of chunked prompts and decodes."""
    arch, overrides = CASES[name]
    check(checkpoint_factory(arch, **overrides), runner, layout)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", (2, 2)),
        ("llama", (4, 1)),
        ("gemma2", (3, 3)),
        ("gpt_bigcode", (3, 1)),
        ("olmo2", (4, 1)),
        ("qwen2_moe", (2, 2)),
        ("cohere2", (2, 3)),
        ("opt", (2, 3)),
    ],
    ids=lambda value: "tp{}-pp{}".format(*value) if isinstance(value, tuple) else value,
)
@pytest.mark.parametrize("runner", RUNNERS)
def test_more_ranks_than_key_value_heads_and_unequal_parts(
    checkpoint_factory: Factory, runner: str, name: str, layout: tuple[int, int]
) -> None:
    arch, overrides = CASES[name]
    check(checkpoint_factory(arch, **overrides), runner, layout)
