"""Logits processors compared with those of transformers, and independence of the rest of the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from neso.engine.core.request import EngineRequest
from neso.engine.runners.base import Runner
from neso.engine.runners.native.runner import NativeRunner
from neso.engine.runners.torch.device_runner import DeviceLogits
from neso.engine.runners.torch.sampling import choose as choose_in_torch
from neso.engine.sampling.adjustments import adjust
from neso.engine.sampling.sampler import Sampler
from neso.engine.sampling.state import SamplingState
from neso.engine.sampling.token_sampling import INVALID_TOKEN, choose
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint
from neso.generation import SamplingParams

VOCAB = 40
WIDE = 384  # of the checkpoint whose runner samples
tokens = st.lists(st.integers(0, 5), max_size=25)


def make_state(prompt=(1,), output=(), end=(), bad_words=(), index=0, **params) -> SamplingState:
    request = EngineRequest(
        request_id="",
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(**params),
        max_tokens=1000,
        end_token_ids=end,
        bad_words=bad_words,
    )
    state = SamplingState.create(request, list(prompt), index)
    for token in output:
        state.record(token)
    return state


def adjusted(state: SamplingState, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return a row before and after."""
    row = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 3
    before = row.copy()
    adjust(row, state)
    return before, row


def by_transformers(processor, known: list[int], row: np.ndarray) -> np.ndarray:
    return processor(torch.tensor([known]), torch.from_numpy(row)[None].clone())[0].numpy()


@settings(max_examples=100, deadline=None)
@given(prompt=tokens.filter(bool), output=tokens, size=st.integers(1, 4), seed=st.integers(0, 100))
def test_repeated_ngrams(prompt, output, size, seed):
    before, after = adjusted(make_state(prompt, output, no_repeat_ngram_size=size), seed)
    processor = transformers.NoRepeatNGramLogitsProcessor(size)
    np.testing.assert_array_equal(after, by_transformers(processor, prompt + output, before))


@settings(max_examples=100, deadline=None)
@given(
    prompt=tokens.filter(bool),
    output=tokens,
    words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=5),
    seed=st.integers(0, 100),
)
def test_bad_words(prompt, output, words, seed):
    before, after = adjusted(make_state(prompt, output, bad_words=tuple(map(tuple, words))), seed)
    processor = transformers.NoBadWordsLogitsProcessor(words, eos_token_id=39)
    np.testing.assert_array_equal(after, by_transformers(processor, prompt + output, before))


@settings(max_examples=50, deadline=None)
@given(prompt=tokens.filter(bool), output=tokens, penalty=st.sampled_from([0.7, 1.2, 2.0]))
def test_repetition_penalty_counts_the_prompt(prompt, output, penalty):
    before, after = adjusted(make_state(prompt, output, repetition_penalty=penalty))
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    np.testing.assert_allclose(after, by_transformers(processor, prompt + output, before), rtol=1e-6)


@pytest.mark.parametrize("num_output", [0, 2, 3, 7])
def test_minimum_length(num_output):
    state = make_state([1, 2], [5] * num_output, end=(7, 9), min_tokens=3)
    before, after = adjusted(state)
    processor = transformers.MinNewTokensLengthLogitsProcessor(2, 3, eos_token_id=[7, 9])
    np.testing.assert_array_equal(after, by_transformers(processor, [1, 2] + [5] * num_output, before))


def test_allowed_tokens_and_dense_bias():
    bias = np.random.default_rng(3).normal(size=VOCAB).astype(np.float32)
    before, after = adjusted(make_state(embedding_bias=bias.tobytes(), allowed_token_ids=(3, 1, 8, 3)))
    expected = np.full(VOCAB, -np.inf, np.float32)
    expected[[1, 3, 8]] = (before + bias)[[1, 3, 8]]
    np.testing.assert_array_equal(after, expected)


def support_by_transformers(row: np.ndarray, top_p: float) -> set[int]:
    kept = transformers.TopPLogitsWarper(top_p)(torch.zeros(1, 1), torch.from_numpy(row)[None].clone())[0]
    return set(torch.nonzero(torch.isfinite(kept))[:, 0].tolist())


def test_top_p_decays_to_its_minimum_and_is_reset():
    state = make_state(top_p=0.9, top_p_decay=0.5, top_p_min=0.2, top_p_reset_ids=6)
    seen = []
    for token in (1, 2, 3, 6, 4):
        seen.append(state.top_p)
        state.record(token)
    np.testing.assert_allclose([*seen, state.top_p], [0.9, 0.45, 0.225, 0.2, 0.9, 0.45])


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_decayed_top_p_draws_from_the_nucleus_of_its_position(position):
    """The distribution over many sequences at one position equals the nucleus of transformers."""
    top_p = [0.95, 0.76, 0.608, 0.5][position]
    row = np.log(np.array([0.3, 0.25, 0.15, 0.1, 0.08, 0.07, 0.05], np.float32))
    states = [
        make_state(output=[0] * position, seed=i, top_p=0.95, top_p_decay=0.8, top_p_min=0.5)
        for i in range(4000)
    ]
    drawn = [t.token_id for t in Sampler().sample(np.tile(row, (4000, 1)), states)]
    support = sorted(support_by_transformers(row, top_p))
    probabilities = np.zeros(7)
    probabilities[support] = np.exp(row[support]) / np.exp(row[support]).sum()
    np.testing.assert_allclose(np.bincount(drawn, minlength=7) / 4000, probabilities, atol=0.03)


MATES = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.9, "top_p_decay": 0.7, "top_p_reset_ids": 2},
    {"no_repeat_ngram_size": 2},
    {"allowed_token_ids": tuple(range(10, 30))},
    {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"embedding_bias": np.linspace(-2, 2, WIDE, dtype=np.float32).tobytes()},
    {"top_k": 5, "min_p": 0.05, "logit_bias": {3: 4.0}},
]


@pytest.fixture(scope="module")
def native(checkpoint_factory: Callable[..., Path]) -> NativeRunner:
    with Checkpoint(checkpoint_factory("llama")) as source:
        return NativeRunner.load(decoder_spec(source.config), source)


@pytest.mark.parametrize("sampler", ["numpy", "native", "torch"])
def test_tokens_do_not_depend_on_the_batch(sampler, native: Runner):
    """Fourteen steps of all requests together in varying order, and of each request alone."""

    def choose_on_device(logits, draws):
        return choose_in_torch(logits.values[: len(draws)], draws).numpy()

    if sampler == "torch":
        wrap = lambda rows: DeviceLogits(torch.from_numpy(rows.copy()))  # noqa: E731
        own = Sampler(choose_on_device)
    else:
        wrap = np.copy
        own = Sampler(choose if sampler == "numpy" else native.choose)
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(14, len(MATES), WIDE)).astype(np.float32) * 2
    words = ((3, 4), (5,))
    fresh = lambda: [make_state(seed=11, bad_words=words, **params) for params in MATES]  # noqa: E731
    together: list[list[int]] = [[] for _ in MATES]
    states = fresh()
    for step in rows:
        order = rng.permutation(len(MATES))
        for i, token in zip(order, own.sample(wrap(step[order]), [states[i] for i in order]), strict=True):
            together[i].append(token.token_id)
    for i, state in enumerate(fresh()):
        assert [own.sample(wrap(step[[i]]), [state])[0].token_id for step in rows] == together[i]
        assert 5 not in together[i]
    assert len(set(map(tuple, together))) > 4


def test_only_a_row_without_allowed_tokens_is_invalid():
    none = make_state(allowed_token_ids=(3,), bad_words=((3,),))
    found = Sampler().sample(np.zeros((2, VOCAB), np.float32), [none, make_state(temperature=0.0)])
    assert [t.token_id for t in found] == [INVALID_TOKEN, 0]


def test_all_log_probabilities():
    rows = np.random.default_rng(0).normal(size=(1, VOCAB)).astype(np.float32)
    (token,) = Sampler().sample(rows.copy(), [make_state(logprobs=-1)])
    assert token.logprobs is not None
    assert sorted(token.logprobs.top_ids) == list(range(VOCAB))
    assert np.exp(token.logprobs.top_logprobs).sum() == pytest.approx(1, abs=1e-5)
    assert token.logprobs.top_logprobs == sorted(token.logprobs.top_logprobs, reverse=True)


def test_returned_logits_are_unprocessed():
    rows = np.random.default_rng(0).normal(size=(2, VOCAB)).astype(np.float32)
    states = [make_state(), make_state(return_generation_logits=True, logit_bias={2: 50.0})]
    plain, requested = Sampler().sample(rows.copy(), states)
    assert plain.logits == b"" and requested.token_id == 2
    np.testing.assert_array_equal(np.frombuffer(requested.logits, np.float32), rows[1])
