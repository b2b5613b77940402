"""Draft tokens from n-grams of the text, and from requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neso.engine.client.request_arrays import MAX_DRAFT_TOKENS, checked_draft
from neso.engine.core.request import EngineRequest, RequestDraft
from neso.engine.core.sequence import Sequence
from neso.engine.spec_decode import request_draft
from neso.engine.spec_decode.ngram import MAX_CANDIDATES, NgramIndex, NgramProposer
from neso.engine.spec_decode.request_draft import draft_of
from neso.generation import DraftTokens, GenerationRequest, InvalidParameter, SamplingParams


def sequence_of(tokens: list[int]) -> Sequence:
    request = EngineRequest(request_id="a", prompt_token_ids=tokens, sampling=SamplingParams(), max_tokens=9)
    return Sequence(id=1, request=request, arrival=1, token_ids=list(tokens))


def search(tokens: list[int], shortest: int, longest: int) -> int | None:
    """Return the same result by searching the whole text."""
    best, best_length = None, 0
    ends = [end for end in range(shortest, len(tokens)) if tokens[end - shortest : end] == tokens[-shortest:]]
    for end in ends[-MAX_CANDIDATES:]:
        length = shortest
        while length < min(longest, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= best_length:
            best, best_length = end, length
    return best


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    shortest=st.integers(1, 3),
    further=st.integers(0, 3),
    known=st.integers(1, 60),
)
def test_index_equals_a_full_search(tokens, shortest, further, known):
    """For any growth of the sequence."""
    index = NgramIndex(shortest, shortest + further)
    for length in sorted({min(known, len(tokens)), len(tokens)}):
        assert index.find(tokens[:length]) == search(tokens[:length], shortest, shortest + further)


def test_draft_continues_the_match():
    draft = NgramProposer(2, 4).propose(sequence_of([1, 2, 3, 4, 5, 9, 2, 3]), 3)
    assert draft is not None and draft.token_ids == [4, 5, 9]


def test_longer_match_precedes_later_match():
    draft = NgramProposer(1, 4).propose(sequence_of([1, 2, 3, 7, 9, 3, 8, 1, 2, 3]), 1)
    assert draft is not None and draft.token_ids == [7]


def test_draft_may_overlap_itself():
    draft = NgramProposer(2, 2).propose(sequence_of([5, 1, 2, 3, 1, 2, 3]), 7)
    assert draft is not None and draft.token_ids == [1, 2, 3, 1, 2, 3, 1]


def test_no_match():
    assert NgramProposer(2, 4).propose(sequence_of([1, 2, 3]), 3) is None
    assert NgramProposer(2, 4).propose(sequence_of([1]), 3) is None


@pytest.mark.parametrize("bounds", [(0, 2), (3, 2)])
def test_invalid_bounds(bounds):
    with pytest.raises(ValueError, match="prompt_lookup_min"):
        NgramProposer(*bounds)


VOCAB = 7


def request_of(draft: DraftTokens, **sampling) -> GenerationRequest:
    return GenerationRequest(request_id="a", prompt=[1], sampling=SamplingParams(**sampling), draft=draft)


def test_distributions_are_computed_per_row(monkeypatch):
    logits = np.random.default_rng(0).normal(size=(5, VOCAB)).astype(np.float32)
    made = []
    real = request_draft.probabilities_of
    monkeypatch.setattr(
        request_draft, "probabilities_of", lambda row, *rest: made.append(row) or real(row, *rest)
    )
    params = SamplingParams(temperature=0.7, top_p=0.8)
    given = RequestDraft([1, 2, 3, 4, 5], logits.tobytes())
    request = EngineRequest(request_id="a", prompt_token_ids=[1], sampling=params, max_tokens=4, draft=given)
    draft = draft_of(request)
    assert draft is not None and draft.token_ids == [1, 2, 3] and draft.probabilities is not None
    assert not made, "a request that arrives must not keep the others waiting"
    np.testing.assert_array_equal(draft.probabilities[2], real(logits[2], params).astype(np.float32))
    assert len(made) == 1


def test_long_drafts_are_rejected():
    assert checked_draft(request_of(DraftTokens([1] * MAX_DRAFT_TOKENS)), VOCAB) is not None
    with pytest.raises(InvalidParameter, match="draft_input_ids: are 129 tokens, at most 128"):
        checked_draft(request_of(DraftTokens([1] * (MAX_DRAFT_TOKENS + 1))), VOCAB)


@pytest.mark.parametrize("sampling", [{"n": 2}, {"best_of": 3}, {"beam_width": 2}])
def test_several_sequences_are_rejected(sampling):
    with pytest.raises(InvalidParameter, match="draft_input_ids"):
        checked_draft(request_of(DraftTokens([1]), **sampling), VOCAB)
