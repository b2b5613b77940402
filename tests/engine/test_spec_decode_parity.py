"""Speculative decoding changes no token: greedy ones equal transformers, sampled ones equal those of the same seeds."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path

import pytest
from oracle import greedy

from neso.engine.client.llm import LLM
from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest
from neso.engine.errors import EngineError
from neso.engine.load.loader import load_engine
from neso.engine.loop.engine_core import EngineCore
from neso.generation import DraftTokens, GuidedDecoding, InvalidParameter, SamplingParams

MAX_TOKENS = 24
METHODS = {
    "ngram": {"speculative": "ngram", "prompt_lookup_min": 1},
    "oracle": {"speculative_model": "same"},
    "oracle-greedy": {"speculative_model": "same", "draft_sample_method": "greedy"},
    "wrong-model": {"speculative_model": "other", "num_speculative_tokens": 3},
}
SCHEDULES = {
    "plain": {},
    "chunk-7": {"max_prefill_chunk": 7},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "tiny-cache-chunk-7": {"num_blocks": 24, "block_size": 4, "max_prefill_chunk": 7},
    "one-at-a-time": {"max_num_seqs": 1},
    "small-steps": {"max_num_batched_tokens": 9, "max_num_seqs": 8},
}


def make_prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(6, 300) for _ in range(33)]
    repeated = [rng.randrange(6, 300) for _ in range(5)] * 4
    prompts = [[rng.randrange(6, 300) for _ in range(n)] for n in (1, 17, 60)]
    return [*prompts, repeated, [*shared, 7], [*shared, 8, 9]]


@pytest.fixture(scope="module")
def checkpoints(checkpoint_factory) -> dict[str, Path]:
    return {
        "same": checkpoint_factory("llama"),
        "other": checkpoint_factory(
            "llama", seed=7, num_hidden_layers=1, hidden_size=32, num_attention_heads=2
        ),
    }


@pytest.fixture(scope="module")
def expected(checkpoints) -> list[list[int]]:
    return greedy(checkpoints["same"], make_prompts(), MAX_TOKENS)


def options_of(checkpoints: dict[str, Path], *parts: dict[str, object]) -> dict[str, object]:
    options: dict[str, object] = {"dtype": "float32", "adaptive_speculation": False}
    for part in parts:
        options |= part
    if "speculative_model" in options:
        options["speculative_model"] = str(checkpoints[str(options["speculative_model"])])
    return options


def answers(
    core: EngineCore, params: list[SamplingParams], seed: int = 0
) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of requests that join while others run."""
    rng = random.Random(seed)
    arriving = [
        EngineRequest(
            request_id=str(i), prompt_token_ids=prompt, sampling=sampling, max_tokens=sampling.max_tokens or 1
        )
        for i, (prompt, sampling) in enumerate(zip(make_prompts(), params, strict=True))
    ]
    tokens: dict[tuple[str, int], list[int]] = {}
    while arriving or core.has_work:
        if arriving and rng.random() < 0.5:
            assert core.add(arriving.pop(0)) == []
        for output in core.step():
            assert not output.error
            tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        core.check_integrity()
    assert core.scheduler.kv.pool.num_used == 0
    return tokens


@pytest.mark.parametrize(
    ("runner", "schedule"),
    [
        *(("native", schedule) for schedule in SCHEDULES),
        *(
            (runner, schedule)
            for runner in ("reference", "torch")
            for schedule in ("plain", "tiny-cache-chunk-7")
        ),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_equal_transformers(checkpoints, expected, method, schedule, runner):
    options = options_of(checkpoints, METHODS[method], SCHEDULES[schedule], {"runner": runner})
    core, _ = load_engine(EngineConfig.from_options(str(checkpoints["same"]), options))
    rng = random.Random(schedule)
    lengths = [rng.choice([MAX_TOKENS, MAX_TOKENS // 2]) for _ in expected]
    found = answers(core, [SamplingParams(temperature=0, max_tokens=length) for length in lengths])
    assert found == {
        (str(i), 0): ids[:length] for i, (ids, length) in enumerate(zip(expected, lengths, strict=True))
    }
    drafts = core.stats().drafts
    if "tiny" in schedule:
        assert core.scheduler.num_preemptions > 0
    elif method.startswith("oracle") and schedule != "small-steps":
        # The draft model equals the model, except after cached prefixes that it has not computed.
        assert drafts.accepted_tokens > 0.9 * drafts.draft_tokens
    elif method == "wrong-model":
        assert drafts.drafts and drafts.accepted_tokens < 0.2 * drafts.draft_tokens


def drawing() -> list[SamplingParams]:
    extras = [
        {},
        {"top_p": 0.8},
        {"top_k": 9, "min_p": 0.02},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.4},
        {"n": 2, "logprobs": 1},
        {"min_tokens": 5, "logit_bias": {9: 2.0}},
    ]
    return [
        SamplingParams(temperature=0.7, seed=i, max_tokens=MAX_TOKENS, **extra)
        for i, extra in enumerate(extras)
    ]


@pytest.mark.parametrize("schedule", ["plain", "tiny-cache-chunk-7"])
@pytest.mark.parametrize("method", ["ngram", "oracle-greedy"])
def test_seeded_tokens_are_unchanged(checkpoints, method, schedule):
    @cache
    def plain() -> dict[tuple[str, int], list[int]]:
        core, _ = load_engine(EngineConfig.from_options(str(checkpoints["same"]), {"runner": "native"}))
        return answers(core, drawing())

    options = options_of(checkpoints, METHODS[method], SCHEDULES[schedule], {"runner": "native"})
    core, _ = load_engine(EngineConfig.from_options(str(checkpoints["same"]), options))
    assert answers(core, drawing(), seed=1) == plain()
    assert core.stats().drafts.drafts


def test_sampled_drafts_of_the_same_model_are_accepted(checkpoints):
    """If both distributions are equal, rejection sampling rejects nothing."""
    options = options_of(checkpoints, METHODS["oracle"], {"runner": "native"})
    core, _ = load_engine(EngineConfig.from_options(str(checkpoints["same"]), options))
    answers(core, [SamplingParams(temperature=1.0, seed=i, max_tokens=MAX_TOKENS) for i in range(6)])
    drafts = core.stats().drafts
    assert drafts.accepted_tokens > 0.95 * drafts.draft_tokens


def test_stop_strings_and_logprobs_within_a_draft(checkpoints):
    """Text, tokens and their number end where they end without drafts."""
    plain = LLM(checkpoints["same"], runner="native")
    prompts = make_prompts()
    free = plain.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), progress=False)
    stops = [(result.text[5:7],) if len(result.text) > 7 else () for result in free]
    params = [SamplingParams(temperature=0, max_tokens=MAX_TOKENS, stop=stop, logprobs=1) for stop in stops]
    guessing = LLM(checkpoints["same"], **options_of(checkpoints, METHODS["oracle"], {"runner": "native"}))
    expected = plain.generate(prompts, params, progress=False)
    found = guessing.generate(prompts, params, progress=False)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.text == theirs.text
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert mine.outputs[0].stop_reason == theirs.outputs[0].stop_reason
        assert [p.token_id for p in mine.outputs[0].logprobs] == [
            p.token_id for p in theirs.outputs[0].logprobs
        ]
    assert guessing.core.stats().drafts.accepted_tokens > 10


@pytest.mark.parametrize("method", ["ngram", "oracle", "oracle-greedy"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guided_output_matches_the_grammar(checkpoints, method, temperature):
    """Draft tokens that violate the grammar are rejected at their position; other requests are not constrained."""
    digits = SamplingParams(
        temperature=temperature,
        seed=3,
        max_tokens=20,
        guided_decoding=GuidedDecoding(regex="(ab|cd|[0-9]){9}"),
    )
    params = [
        digits if i % 2 else SamplingParams(temperature=temperature, seed=i, max_tokens=20) for i in range(6)
    ]
    plain = LLM(checkpoints["same"], runner="reference").generate(make_prompts(), params, progress=False)
    options = options_of(checkpoints, METHODS[method], {"runner": "reference"})
    llm = LLM(checkpoints["same"], **options)
    found = llm.generate(make_prompts(), params, progress=False)
    for i, result in enumerate(found):
        assert i % 2 == 0 or re.fullmatch("(ab|cd|[0-9]){9}", result.text)
    if temperature == 0 or method != "oracle":
        assert [result.outputs[0].token_ids for result in found] == [r.outputs[0].token_ids for r in plain]
    assert llm.core.stats().drafts.drafts


def test_drafts_of_requests(checkpoints, expected):
    llm = LLM(checkpoints["same"], runner="native")
    prompts = make_prompts()
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    drafts = [DraftTokens([*ids[:3], (ids[3] + 1) % 300, 5]) for ids in expected]
    found = llm.generate(prompts, params, progress=False, drafts=drafts)
    assert [result.outputs[0].token_ids for result in found] == expected
    assert all((result.draft_tokens, result.accepted_draft_tokens) == (5, 3) for result in found)


@pytest.mark.parametrize(
    ("draft", "several", "field"),
    [
        (DraftTokens([]), {}, "draft_input_ids"),
        (DraftTokens([9999]), {}, "draft_input_ids"),
        (DraftTokens([9]), {"n": 2}, "draft_input_ids"),
        (DraftTokens([9]), {"best_of": 2}, "draft_input_ids"),
        (DraftTokens([9]), {"beam_width": 2}, "draft_input_ids"),
        (DraftTokens([9], acceptance_threshold=0.0), {}, "draft_acceptance_threshold"),
    ],
)
def test_invalid_drafts_are_rejected(checkpoints, draft, several, field):
    llm = LLM(checkpoints["same"], runner="reference")
    with pytest.raises(InvalidParameter, match=field):
        llm.generate([[1, 2]], SamplingParams(**several), progress=False, drafts=[draft])


@pytest.mark.parametrize("runner", ["reference", "native", "torch"])
def test_a_draft_model_with_a_shorter_context(checkpoints, checkpoint_factory, expected, runner):
    """Learned positions end: longer sequences continue without drafts, shorter ones with them."""
    short = checkpoint_factory("gpt2", n_positions=32, max_position_embeddings=32)
    options = {"runner": runner, "dtype": "float32", "adaptive_speculation": False, "block_size": 4}
    llm = LLM(checkpoints["same"], speculative_model=str(short), **options)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    found = llm.generate(make_prompts(), params, progress=False)
    assert [result.outputs[0].token_ids for result in found] == expected
    drafts = [result.draft_tokens for result in found]
    assert [bool(count) for count in drafts] == [len(prompt) < 32 for prompt in make_prompts()]
    (again,) = llm.generate(make_prompts()[:1], params, progress=False)
    assert again.draft_tokens


def test_another_vocabulary_is_rejected(checkpoints, checkpoint_factory):
    other = checkpoint_factory("llama", vocab_size=4096)
    with pytest.raises(EngineError, match="vocabulary"):
        load_engine(EngineConfig.from_options(str(checkpoints["same"]), {"speculative_model": str(other)}))


def test_invalid_options():
    for options, message in (
        ({"speculative": "oracle"}, "speculative"),
        ({"speculative": "draft_model"}, "speculative_model"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineConfig.from_options("somewhere", options)


@pytest.mark.parametrize("runner", ["reference", "native"])
@pytest.mark.parametrize(
    "narrower",
    [{"vocab_size": 200}, {"max_position_embeddings": 30}, {"arch": "gpt2", "n_positions": 30}],
    ids=str,
)
def test_a_draft_model_with_fewer_tokens_and_positions(
    checkpoint_factory, checkpoints, expected, narrower, runner
):
    """Unknown tokens and positions of one sequence must not disable drafts for all."""
    draft = checkpoint_factory(**{"arch": "llama", **narrower})
    options = {"speculative_model": str(draft), "runner": runner, "adaptive_speculation": False}
    core, _ = load_engine(EngineConfig.from_options(str(checkpoints["same"]), options))
    params = [SamplingParams(temperature=0, max_tokens=MAX_TOKENS)] * len(expected)
    assert answers(core, params) == {(str(i), 0): ids for i, ids in enumerate(expected)}
    drafts = core.stats().drafts.drafts
    assert drafts
    answers(core, params)
    assert core.stats().drafts.drafts > drafts, "it still guesses"
