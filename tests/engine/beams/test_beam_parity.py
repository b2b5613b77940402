"""Beams in float32 equal those of transformers' generate, token by token, for any schedule."""

from __future__ import annotations

import random
from typing import Any

import pytest
from beam_oracle import beam_search

from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest
from neso.engine.load.loader import load_engine
from neso.engine.loop.engine_core import EngineCore
from neso.generation import SamplingParams

MAX_TOKENS = 14
# Tokens that the checkpoint generates often, so that beams end at all lengths.
ENDS = list(range(20, 60))

SEARCHES: dict[str, dict[str, Any]] = {
    "plain": {"num_beams": 4, "num_return_sequences": 4},
    "two": {"num_beams": 2, "num_return_sequences": 1},
    "wide": {"num_beams": 7, "num_return_sequences": 5, "early_stopping": True},
    "short": {"num_beams": 3, "num_return_sequences": 3, "length_penalty": -1.5},
    "long": {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 2.0, "early_stopping": "never"},
    "canonical": {
        "num_beams": 4,
        "num_return_sequences": 2,
        "length_penalty": 0.0,
        "early_stopping": "never",
    },
    "penalized": {"num_beams": 3, "num_return_sequences": 3, "repetition_penalty": 1.3},
    "ngrams": {"num_beams": 3, "num_return_sequences": 3, "no_repeat_ngram_size": 2},
    "minimum": {"num_beams": 3, "num_return_sequences": 3, "min_new_tokens": 6},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunk-1": {"max_prefill_chunk": 1},
    "chunk-7": {"max_prefill_chunk": 7},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "tiny-cache": {"num_blocks": 40, "block_size": 4},
    "tiny-cache-no-prefix-cache": {"num_blocks": 40, "block_size": 4, "enable_prefix_caching": False},
    "tiny-blocks": {"num_blocks": 150, "block_size": 1, "max_prefill_chunk": 7},
}


def make_prompts() -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(6, 300) for _ in range(20)]
    return [[rng.randrange(6, 300) for _ in range(n)] for n in (1, 7, 16, 33)] + [[*shared, 7], [*shared, 8]]


def as_params(search: dict[str, Any]) -> SamplingParams:
    names = {"num_beams": "beam_width", "num_return_sequences": "n", "min_new_tokens": "min_tokens"}
    return SamplingParams(temperature=0, **{names.get(name, name): value for name, value in search.items()})


@pytest.fixture(scope="module")
def expected(llama_checkpoint):
    found: dict[str, Any] = {}

    def search(name: str, end):
        key = f"{name} {end}"
        if key not in found:
            found[key] = beam_search(
                llama_checkpoint, make_prompts(), end, max_new_tokens=MAX_TOKENS, **SEARCHES[name]
            )
        return found[key]

    return search


def run(core: EngineCore, requests: list[EngineRequest], seed: object) -> dict[str, list[Any]]:
    """Run requests that join while others run; return the outputs of each in order."""
    rng = random.Random(str(seed))
    arriving, outputs = list(requests), {request.request_id: [] for request in requests}
    while arriving or core.has_work:
        if arriving and rng.random() < 0.5:
            assert core.add(arriving.pop(0)) == []
        for output in core.step():
            assert not output.error, output.error
            outputs[output.request_id].append(output)
        core.check_integrity()
    assert core.scheduler.kv.pool.num_used == 0
    return outputs


def check(core: EngineCore, expected, search: str, ends: list[int], seed: object) -> None:
    """Compare the beams of all prompts while as many greedy requests run."""
    params, penalty = as_params(SEARCHES[search]), SEARCHES[search].get("length_penalty", 1.0)
    requests = []
    for i, prompt in enumerate(make_prompts()):
        common = {"prompt_token_ids": prompt, "max_tokens": MAX_TOKENS, "end_token_ids": tuple(ends)}
        requests.append(EngineRequest(request_id=f"beams {i}", sampling=params, **common))
        requests.append(
            EngineRequest(request_id=f"other {i}", sampling=SamplingParams(temperature=0), **common)
        )
    outputs = run(core, requests, seed)
    for i, beams in enumerate(expected(search, ends or -1)):
        found = outputs[f"beams {i}"]
        assert [o.token_ids for o in found] == [tokens for tokens, _ in beams]
        assert [o.index for o in found] == list(range(params.n))
        for output, (tokens, score) in zip(found, beams, strict=True):
            assert output.cumulative_logprob / len(tokens) ** penalty == pytest.approx(score, rel=1e-5)


@pytest.fixture(scope="module")
def cores(llama_checkpoint):
    return {
        runner: load_engine(
            EngineConfig.from_options(str(llama_checkpoint), {"runner": runner, "dtype": "float32"})
        )[0]
        for runner in ("reference", "native", "torch")
    }


@pytest.mark.parametrize("ends", [[], [ENDS[0]], ENDS], ids=["no-end", "one-end", "many-ends"])
@pytest.mark.parametrize("search", SEARCHES)
def test_beams_equal_transformers(cores, expected, search, ends):
    check(cores["native"], expected, search, ends, search)


@pytest.mark.parametrize("runner", ["reference", "torch"])
@pytest.mark.parametrize("search", ["plain", "penalized", "long"])
def test_runners_agree(cores, expected, search, runner):
    check(cores[runner], expected, search, ENDS, search)


@pytest.mark.parametrize("search", ["plain", "wide", "long"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_results_do_not_depend_on_the_schedule(llama_checkpoint, expected, search, schedule):
    options = {"runner": "reference", **SCHEDULES[schedule]}
    core, _ = load_engine(EngineConfig.from_options(str(llama_checkpoint), options))
    check(core, expected, search, ENDS, schedule)
    if "tiny" in schedule:
        assert core.scheduler.num_preemptions > 0, "the cache is too large for this test"
