"""Attention windows and sinks set by options: tokens equal those of transformers with the same mask."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import load_oracle
from runners.plan_builder import PlanBuilder, random_tokens, run

from neso.engine.client.llm import LLM
from neso.engine.errors import EngineError
from neso.engine.runners.registry import open_model
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.specs.decoder_spec import limit_attention
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import open_source
from neso.generation import SamplingParams

MAX_TOKENS = 20
LIMITS = {"window": (16, 0), "sinks": (16, 4), "many-sinks": (7, 21), "wide": (40, 1)}
SCHEDULES = {
    "plain": {},
    "chunk-7": {"max_prefill_chunk": 7, "block_size": 4},
    "tiny-cache": {"num_blocks": 30, "block_size": 4, "max_prefill_chunk": 8, "enable_overlap": False},
    "no-evict": {
        "num_blocks": 40,
        "block_size": 4,
        "batch_scheduler_policy": "guaranteed_no_evict",
        "max_prefill_chunk": 8,
    },
}


def make_prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(6, 300) for _ in range(length)] for length in (1, 15, 16, 33, 70, 140)]


def masked_greedy(model: torch.nn.Module, prompt: list[int], window: int, sinks: int) -> list[int]:
    """Return greedy tokens of a model with an explicit attention mask and without a cache."""
    tokens = list(prompt)
    for _ in range(MAX_TOKENS):
        positions = torch.arange(len(tokens))
        distance = positions[:, None] - positions
        seen = (distance >= 0) & ((distance < window) | (positions < sinks))
        mask = torch.where(seen, 0.0, float("-inf"))[None, None]
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module", params=LIMITS, ids=str)
def limited(request, checkpoint_factory):
    directory = checkpoint_factory("llama")
    model = load_oracle(directory)
    window, sinks = LIMITS[request.param]
    return directory, (window, sinks), [masked_greedy(model, p, window, sinks) for p in make_prompts()]


@pytest.mark.pairwise
@pytest.mark.parametrize("runner", ["reference", "native", "torch"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_tokens_equal_a_masked_model(limited, runner, schedule):
    directory, (window, sinks), expected = limited
    llm = LLM(
        directory,
        runner=runner,
        dtype="float32",
        max_attention_window_size=window,
        sink_token_length=sinks,
        **SCHEDULES[schedule],
    )
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for _ in range(2):  # the second time from the prefix cache where possible
        results = llm.generate(make_prompts(), sampling, progress=False)
        assert [result.outputs[0].token_ids for result in results] == expected
        llm.core.check_integrity()
        assert llm.core.scheduler.kv.pool.num_used == 0
    if schedule == "no-evict":
        assert llm.core.scheduler.num_preemptions == 0


def test_the_mask_changes_the_output(limited):
    """Otherwise the comparison above would prove nothing."""
    directory, _, expected = limited
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    results = LLM(directory, runner="reference").generate(make_prompts(), sampling, progress=False)
    assert [result.outputs[0].token_ids for result in results] != expected


def test_long_sequences_fit_into_a_small_cache(checkpoint_factory):
    """Blocks outside the window are reused: 400 tokens in a cache of 96."""
    llm = LLM(
        checkpoint_factory("llama"),
        runner="reference",
        max_attention_window_size=32,
        num_blocks=12,
        block_size=8,
        max_prefill_chunk=16,
    )
    assert llm.info.max_model_len == 512
    sampling = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    (result,) = llm.generate([[7, 8, 9]], sampling, progress=False)
    assert len(result.outputs[0].token_ids) == 400
    assert llm.core.scheduler.num_preemptions == 0


@pytest.mark.parametrize(("window", "sinks"), [(1100, 5), (900, 700), (1500, 1400)])
def test_long_windows_split_among_threads_equal_the_reference(checkpoint_factory, window, sinks):
    """The native runner splits the keys of a long context; the sinks are in one of the parts."""
    directory = checkpoint_factory("llama", max_position_embeddings=4096)
    tokens = random_tokens(2300)
    options = RunnerOptions(dtype="float32", max_attention_window_size=window, sink_token_length=sinks)
    logits = []
    for name in ("reference", "native"):
        with open_source(str(directory)) as source:
            runner = open_model(source, name, replace(options, num_threads=2), lambda length: length)
        builder = PlanBuilder(16, 160)
        runner.allocate_cache(builder.layout)
        sequence = builder.sequence(tokens)
        run(runner, builder.plan([(sequence, 2298)], rows=[]))
        logits.append([run(runner, builder.plan([(sequence, 1)])) for _ in range(2)])
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attention_window_size": 0}, "max_attention_window_size must be at least 1"),
        ({"sink_token_length": 4}, "sink_token_length needs"),
        ({"max_attention_window_size": 8, "sink_token_length": -1}, "sink_token_length must be at least 0"),
        ({"runner": "transformers", "max_attention_window_size": 8}, "use their own attention windows"),
    ],
)
def test_invalid_limits_are_rejected(checkpoint_factory, options, message):
    with pytest.raises(EngineError, match=message):
        LLM(checkpoint_factory("llama"), **options)


@pytest.mark.parametrize(
    ("sizes", "windows"),
    [
        ([16, 512, 32], (16, None, 32)),
        ([16, 600], (16, None, 16)),
        ([16, 32, 64, 8], (16, 32, 64)),
        ([512], (None, None, None)),
        (16, (16, 16, 16)),
    ],
)
def test_a_list_of_sizes_repeats_over_the_layers(checkpoint_factory, sizes, windows):
    with open_source(str(checkpoint_factory("llama"))) as source:
        spec = decoder_spec(source.config)
    assert limit_attention(spec, sizes, 0).sliding_windows == windows
    own = replace(spec, sliding_windows=(12, None, 40))
    narrowed = limit_attention(own, sizes, 0).sliding_windows
    assert narrowed == tuple(
        min(filter(None, pair), default=None) for pair in zip(own.sliding_windows, windows, strict=True)
    )


@pytest.mark.parametrize("runner", ["reference", "native"])
def test_layers_with_different_windows(checkpoint_factory, runner):
    """One layer with full attention preserves information that the other layers lose."""
    directory = checkpoint_factory("llama")
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)

    def answers(sizes):
        llm = LLM(directory, runner=runner, dtype="float32", max_attention_window_size=sizes)
        return [r.outputs[0].token_ids for r in llm.generate(make_prompts(), sampling, progress=False)]

    assert answers([16, 16]) == answers(16)
    assert answers([16, 512, 16]) not in (answers(16), answers(None))
