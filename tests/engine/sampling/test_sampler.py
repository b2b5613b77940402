"""The sampler: filters against a naive reference, empirical distributions, seeds, penalties, log probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neso.engine.core.request import EngineRequest
from neso.engine.sampling.sampler import Sampler
from neso.engine.sampling.state import SamplingState
from neso.engine.sampling.token_sampling import INVALID_TOKEN, draw, exponentials, filter_weights
from neso.generation import SamplingParams


def state(index=0, prompt=(), end=(), bad_words=(), **params) -> SamplingState:
    sampling = SamplingParams(**params)
    request = EngineRequest(
        request_id="",
        prompt_token_ids=list(prompt),
        sampling=sampling,
        max_tokens=1000,
        end_token_ids=end,
        bad_words=bad_words,
    )
    return SamplingState.create(request, list(prompt), index)


def sample(logits, *states):
    tokens = Sampler().sample(np.array(logits, np.float32), list(states))
    return [t.token_id for t in tokens]


def oracle_support(probabilities, top_k, top_p, min_p):
    """Return the tokens of one row that remain after the filters, by definition."""
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))[:top_k]
    total = sum(probabilities[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if top_p < 1.0 and mass >= top_p * total:
            break
        kept.append(i)
        mass += probabilities[i]
    return {i for i in kept if probabilities[i] >= min_p * probabilities[order[0]]} | {order[0]}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([5, 300, 1000]),
    top_k=st.sampled_from([1, 3, 50, 400, 0]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_filters_match_the_oracle(seed, vocab, top_k, top_p, min_p):
    """The tokens drawn over many uniforms are exactly those of a row-by-row reference."""
    rng = np.random.default_rng(seed)
    row = exponentials(rng.normal(size=(1, vocab)).astype(np.float32) * 3, np.ones(1, np.float32))
    row /= row.sum()
    k = min(top_k or vocab, vocab)
    support = oracle_support(row[0].astype(float).tolist(), k, top_p, min_p)
    draws = 200
    uniforms = np.linspace(0, 1, draws, endpoint=False)
    rows = np.repeat(row, draws, axis=0)
    kept = filter_weights(
        rows,
        np.full(draws, k, np.int32),
        np.full(draws, top_p, np.float32),
        np.full(draws, min_p, np.float32),
    )
    chosen = draw(kept, uniforms)
    drawn = set(chosen.tolist())
    edge = {i for i in drawn - support if row[0, i] < 1e-4}
    assert drawn - edge <= support
    assert int(row[0].argmax()) in drawn


def test_distribution_is_the_softmax():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    states = [state(seed=i) for i in range(4000)]
    counts = np.bincount(sample([logits] * 4000, *states), minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_filtered_distribution_is_renormalised():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    states = [state(seed=i, top_k=2) for i in range(4000)]
    counts = np.bincount(sample([logits] * 4000, *states), minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.625, 0.375, 0, 0], atol=0.03)


def test_seeded_tokens_do_not_depend_on_the_batch():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(8, 500)).astype(np.float32)
    params = {"temperature": 1.3, "seed": 7, "top_p": 0.9}
    alone = [sample([row], state(**params))[0] for row in rows]
    mate = {"temperature": 0.7, "seed": 1, "top_k": 400}
    together = [
        sample([other, row], state(**mate), state(**params))[1]
        for row, other in zip(rows, rows[::-1], strict=True)
    ]
    assert alone == together
    stream = state(**params)
    first = [sample([rows[0]], stream)[0] for _ in range(10)]
    again = state(**params)
    assert first == [sample([rows[0]], again)[0] for _ in range(10)]
    assert first != [sample([rows[0]], s)[0] for s in [state(index=1, **params)] for _ in range(10)]


def test_greedy_and_random_rows_mix():
    logits = [[0, 5, 0], [0, 5, 0], [9, 0, 0]]
    assert sample(logits, state(temperature=0), state(top_k=1), state(temperature=0)) == [1, 1, 0]


def test_penalties():
    s = state(temperature=0, presence_penalty=1.0, frequency_penalty=0.5)
    assert [sample([[2.0, 1.9, 0.0]], s)[0] for _ in range(3)] == [0, 1, 0]
    repeated = state(temperature=0, repetition_penalty=2.0, prompt=(0,))
    assert sample([[2.0, 1.5, -1.0]], repeated) == [1]
    negative = state(temperature=0, repetition_penalty=2.0, prompt=(0, 1))
    assert sample([[-1.0, -1.5, -1.9]], negative) == [2]


def test_bias_and_minimum_length():
    assert sample([[1.0, 0.0]], state(temperature=0, logit_bias={1: 5.0})) == [1]
    s = state(temperature=0, min_tokens=2, end=(0,))
    assert [sample([[9.0, 0.0]], s)[0] for _ in range(3)] == [1, 1, 0]


def test_logprobs_are_unprocessed():
    logits = np.array([[1.0, 2.0, 3.0, 0.0]], np.float32)
    s = state(temperature=0, logprobs=2, logit_bias={0: 100.0})
    (token,) = Sampler().sample(logits.copy(), [s])
    expected = logits[0] - np.log(np.exp(logits[0]).sum())
    assert token.token_id == 0 and token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(expected[0], abs=1e-5)
    assert token.logprobs.rank == 3
    assert token.logprobs.top_ids == [2, 1]
    np.testing.assert_allclose(token.logprobs.top_logprobs, expected[[2, 1]], rtol=1e-5)


def test_nan_rows_give_invalid_tokens():
    nan = float("nan")
    logits = [[nan, 1.0], [0.0, 1.0], [0.0, nan]]
    assert sample(logits, state(temperature=0), state(temperature=0), state(temperature=1.0)) == [
        INVALID_TOKEN,
        1,
        INVALID_TOKEN,
    ]


@pytest.mark.parametrize(
    "params",
    [
        {
            "logit_bias": {1: 1e30, 2: 1e30},
            "embedding_bias": np.array([0, 1e30, 1e30, 0], np.float32).tobytes(),
        },
        {"logit_bias": {0: -1e30, 3: -1e30}, "repetition_penalty": 1e6},
        {"logit_bias": {1: 5.0, 2: 5.0}, "top_k": 2**31 - 1, "temperature": 0.01},
        {"logit_bias": {1: 1e30}, "temperature": 1e-40},
    ],
)
def test_extreme_parameters_cause_no_nan(params):
    """With a NaN weight, the last token would be sampled."""
    chosen = {sample([[0.1, 0.3, 0.2, 0.0]], state(seed=seed, **params))[0] for seed in range(20)}
    assert chosen <= {1, 2} and chosen


def test_a_bias_that_excludes_all_tokens_is_invalid():
    bias = np.full(4, -np.inf, np.float32).tobytes()
    assert sample([[0.1, 0.3, 0.2, 0.0]], state(embedding_bias=bias)) == [INVALID_TOKEN]
