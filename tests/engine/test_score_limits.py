"""Limits of log probabilities and logits per request."""

from __future__ import annotations

import pytest
from checkpoints import VOCAB_SIZE

from neso.engine.client.llm import LLM
from neso.engine.sampling.score_limits import ScoreLimits
from neso.generation import InvalidParameter, SamplingParams

PROMPT = [5, 6, 7, 8]
ROW = 4 * VOCAB_SIZE


def run(llm: LLM, **params):
    (result,) = llm.generate(
        [PROMPT], SamplingParams(**{"max_tokens": 3, "ignore_eos": True, **params}), progress=False
    )
    return result


def refused(llm: LLM, **params) -> str:
    with pytest.raises(InvalidParameter) as caught:
        run(llm, **params)
    llm.core.check_integrity()
    return f"{caught.value.field}: {caught.value.message}"


@pytest.fixture
def load(llama_checkpoint):
    return lambda **options: LLM(llama_checkpoint, runner="reference", num_blocks=64, **options)


def test_default_limit_of_logprobs(load):
    llm = load()
    assert len(run(llm, logprobs=20).outputs[0].logprobs[0].top) == 20
    for params in ({"logprobs": 21}, {"logprobs": -1}, {"prompt_logprobs": 21}):
        message = refused(llm, **params)
        assert message.startswith(f"{next(iter(params))}: ") and "max_logprobs" in message


def test_max_logprobs(load):
    llm = load(max_logprobs=30)
    assert len(run(llm, logprobs=30).outputs[0].logprobs[0].top) == 30
    assert "at most 30" in refused(llm, logprobs=31)
    assert "at least 0" in refused(llm, logprobs=-1)
    assert len(run(llm, prompt_logprobs=30).prompt_logprobs[1].top) == 30
    assert "at most 0" in refused(load(max_logprobs=0), logprobs=1)


def test_all_logprobs_need_the_option(load):
    llm = load(max_logprobs="-1")
    for count in (-1, VOCAB_SIZE):
        assert len(run(llm, logprobs=count).outputs[0].logprobs[0].top) == VOCAB_SIZE
    assert f"at most {VOCAB_SIZE}" in refused(llm, logprobs=VOCAB_SIZE + 1)
    assert "at most 20" in refused(llm, prompt_logprobs=21), "a prompt has them all at once"
    with pytest.raises(ValueError, match="max_logprobs"):
        ScoreLimits(max_logprobs=-2)


@pytest.mark.parametrize(
    ("option", "params", "rows"),
    [
        ("gather_context_logits", {"return_context_logits": True}, 4),
        ("gather_generation_logits", {"return_generation_logits": True}, 3),
        ("gather_generation_logits", {"return_generation_logits": True, "n": 2, "best_of": 4}, 12),
        ("gather_generation_logits", {"return_generation_logits": True, "beam_width": 3}, 9),
    ],
)
def test_logits_of_a_request_are_limited(load, monkeypatch, option, params, rows):
    field = next(iter(params))
    by_default, allowed, forbidden = load(), load(**{option: True}), load(**{option: "false"})
    monkeypatch.setattr("neso.engine.sampling.limits.MAX_LOGITS_BYTES", rows * ROW)
    run(by_default, **params)
    assert refused(forbidden, **params).startswith(f"{field}: ")
    monkeypatch.setattr("neso.engine.sampling.limits.MAX_LOGITS_BYTES", rows * ROW - 1)
    message = refused(by_default, **params)
    assert message.startswith(f"{field}: {rows} rows") and option in message
    run(allowed, **params)


def test_without_max_tokens_the_context_counts(load, monkeypatch):
    llm = load()
    room = llm.info.max_model_len - len(PROMPT)
    monkeypatch.setattr("neso.engine.sampling.limits.MAX_LOGITS_BYTES", (room - 1) * ROW)
    message = refused(llm, return_generation_logits=True, max_tokens=None)
    assert message.startswith(f"return_generation_logits: {room} rows")
