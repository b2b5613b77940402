"""Verification: accepted draft tokens and the tokens after them have the model's distribution."""

from __future__ import annotations

import numpy as np
import pytest

from neso.engine.core.request import EngineRequest
from neso.engine.sampling.sampler import Sampler
from neso.engine.sampling.state import SamplingState
from neso.engine.sampling.token_sampling import INVALID_TOKEN, probabilities_of
from neso.engine.spec_decode.draft import Draft, DraftTree
from neso.engine.spec_decode.verification import Verified, draw_one, verify
from neso.generation import SamplingParams

VOCAB = 5
ROUNDS = 2500
LENGTH = 2


def logits_after(tokens: tuple[int, ...]) -> np.ndarray:
    """Return logits of a model that depend on all preceding tokens."""
    seed = np.random.default_rng([7, *tokens])
    return seed.normal(scale=1.2, size=VOCAB).astype(np.float32)


def draft_logits_after(tokens: tuple[int, ...]) -> np.ndarray:
    """Return logits of a draft model that partly agrees."""
    other = np.random.default_rng([8, *tokens]).normal(scale=0.8, size=VOCAB)
    return (logits_after(tokens) + other).astype(np.float32)


def state_of(params: SamplingParams) -> SamplingState:
    request = EngineRequest(request_id="a", prompt_token_ids=[0], sampling=params, max_tokens=99)
    return SamplingState.create(request, [0])


def exact(params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """Return the probabilities of all texts of a length, token by token."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, chance in texts.items():
            row = logits_after(text)
            # As in the sampler: tokens are penalized by their count in the output.
            for token in text:
                row[token] -= params.frequency_penalty
            if params.presence_penalty:
                row[list(set(text))] -= params.presence_penalty
            for token, p in enumerate(probabilities_of(row, params)):
                if p > 0:
                    longer[(*text, token)] = chance * p
        texts = longer
    return texts


def generate(params: SamplingParams, length: int, seed: int, how: str) -> tuple[int, ...]:
    """Generate a text in steps with drafts of 2 tokens."""
    rng = np.random.default_rng(seed)
    state, sampler = state_of(params), Sampler()
    text: tuple[int, ...] = ()
    while len(text) < length:
        draft = make_draft(text, params, rng, how)
        rows = [logits_after(text)]
        for node in range(len(draft)):
            rows.append(logits_after((*text, *draft.path(node))))
        (result,) = verify(sampler, np.array(rows), [state], [draft], [len(draft)])
        text += tuple(token.token_id for token in result.tokens)
    return text[:length]


def make_draft(text: tuple[int, ...], params: SamplingParams, rng, how: str) -> Draft:
    if how == "fixed":
        return Draft([1, 3])
    if how == "tree":
        return Draft([0, 1, 3, 2], DraftTree((-1, -1, 1, 0)))
    tokens: list[int] = []
    rows = []
    for _ in range(2):
        q = probabilities_of(draft_logits_after((*text, *tokens)), params).astype(np.float32)
        tokens.append(draw_one(q, rng.random()))
        rows.append(q)
    return Draft(tokens, probabilities=np.array(rows))


def chi_square(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> float:
    """Return by how many standard deviations the statistic exceeds its mean; rare texts are merged."""
    assert counts.keys() <= expected.keys(), "a text that the model does not say"
    total = sum(counts.values())
    rare_found = rare_expected = statistic = 0.0
    cells = 0
    for text, chance in expected.items():
        if chance * total < 5:
            rare_found += counts.get(text, 0)
            rare_expected += chance * total
        else:
            statistic += (counts.get(text, 0) - chance * total) ** 2 / (chance * total)
            cells += 1
    if rare_expected > 5:
        statistic += (rare_found - rare_expected) ** 2 / rare_expected
        cells += 1
    freedom = cells - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


PARAMS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.6),
    "filters": SamplingParams(top_k=4, top_p=0.9, min_p=0.05),
    "penalties": SamplingParams(frequency_penalty=0.7, presence_penalty=0.4),
}


@pytest.mark.parametrize(
    ("how", "kind"),
    [("fixed", "plain"), ("fixed", "penalties"), ("tree", "filters"), *(("drawn", kind) for kind in PARAMS)],
)
def test_texts_follow_the_distribution_of_the_model(how, kind):
    params = PARAMS[kind]
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(ROUNDS):
        text = generate(params, LENGTH, seed, how)
        counts[text] = counts.get(text, 0) + 1
    assert chi_square(counts, exact(params, LENGTH)) < 4


def test_the_statistic_detects_a_wrong_distribution():
    """Draft tokens are accepted with the draft model's probabilities instead of the model's."""
    params = PARAMS["plain"]
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(ROUNDS):
        rng = np.random.default_rng(seed)
        text: tuple[int, ...] = ()
        while len(text) < LENGTH:
            right, wrong = (
                probabilities_of(rows(text), params) for rows in (logits_after, draft_logits_after)
            )
            p = 0.8 * right + 0.2 * wrong
            text += (draw_one(p, rng.random()),)
        counts[text] = counts.get(text, 0) + 1
    assert chi_square(counts, exact(params, LENGTH)) > 4


def one(
    draft: Draft, rows: np.ndarray, params: SamplingParams, state: SamplingState | None = None
) -> Verified:
    (result,) = verify(Sampler(), rows, [state or state_of(params)], [draft], [len(draft)])
    return result


def peaks(*tokens: int) -> np.ndarray:
    return np.eye(VOCAB, dtype=np.float32)[list(tokens)] * 9


GREEDY = SamplingParams(temperature=0)


def test_greedy_path_through_a_tree():
    """Root 2, below it 4, below that 1; a sibling of node 2 is not accepted."""
    draft = Draft([3, 2, 4, 2, 1], DraftTree((-1, -1, 1, 1, 2)))
    result = one(draft, peaks(2, 0, 4, 1, 0, 3), GREEDY)
    assert [token.token_id for token in result.tokens] == [2, 4, 1, 3]
    assert result.path == [1, 2, 4] and result.row == 5


@pytest.mark.parametrize("drawn", [False, True])
def test_nan_logits_after_accepted_tokens(drawn):
    """Valid tokens are kept, but the last one is computed again: its logits then fail the sequence."""
    rows = peaks(1, 2, 3)
    rows[2] = np.nan
    probabilities = np.array([rows[0], rows[1]]) / 9 if drawn else None
    params = SamplingParams(temperature=0.01, seed=1) if drawn else GREEDY
    result = one(Draft([1, 2], probabilities=probabilities), rows, params)
    assert [token.token_id for token in result.tokens] == [1, 2] and result.path == [0]
    rows[0] = np.nan
    assert one(Draft([1, 2], probabilities=probabilities), rows, params).tokens[0].token_id == INVALID_TOKEN


def test_unused_random_numbers_are_used_for_the_next_tokens():
    params = SamplingParams(seed=5)
    with_drafts, without = state_of(params), state_of(params)
    one(Draft([4, 4, 4]), peaks(1, 1, 1, 1), params, with_drafts)
    without.uniform()
    assert [with_drafts.uniform() for _ in range(20)] == [without.uniform() for _ in range(20)]


def test_logprobs_are_those_of_the_model_after_a_rejection():
    params = SamplingParams(seed=3, logprobs=2, frequency_penalty=1.5)
    rows = np.array([logits_after(()), logits_after((1,))])
    wrong = np.zeros((1, VOCAB), np.float32)
    wrong[0, 1] = 1.0
    result = one(Draft([1], probabilities=wrong), rows.copy(), params)
    for row, token in zip(rows, result.tokens, strict=False):
        assert token.logprobs is not None and token.logprobs.token_id == token.token_id
        expected = np.log(np.exp(row) / np.exp(row).sum())[token.token_id]
        assert token.logprobs.logprob == pytest.approx(expected, abs=1e-5)


def test_a_threshold_rejects_tokens_with_minus_infinity():
    """The draft token also has no probability in the draft's distribution."""
    rows = peaks(3, 3)
    rows[0, 1] = -np.inf
    drawn = np.eye(1, VOCAB, 2, dtype=np.float32)
    result = one(Draft([1], probabilities=drawn, acceptance_threshold=0.5), rows, GREEDY)
    assert [token.token_id for token in result.tokens] == [3] and not result.path


def test_a_threshold_rejects_tokens_that_are_not_allowed():
    """The draft token also has no probability in the draft's distribution."""
    params = SamplingParams(temperature=0, allowed_token_ids=(0, 1))
    distribution = np.array([[0.5, 0.5, 0, 0, 0]], np.float32)
    draft = Draft([3], probabilities=distribution, acceptance_threshold=0.5)
    logits = np.zeros((2, VOCAB), np.float32)
    (result,) = verify(Sampler(), logits, [state_of(params)], [draft], [1])
    assert result.path == [] and result.tokens[0].token_id in (0, 1)
