"""Draft tokens from n-grams of the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neso.engine.core.request import EngineRequest
from neso.engine.core.sequence import Sequence
from neso.engine.spec_decode.ngram import MAX_CANDIDATES, NgramIndex, NgramProposer
from neso.generation import SamplingParams


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
