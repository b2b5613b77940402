"""Guesses from the text itself."""

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
    """The same by looking everywhere."""
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
def test_index_finds_what_a_search_finds(tokens, shortest, further, known):
    """However the sequence grows."""
    index = NgramIndex(shortest, shortest + further)
    for length in sorted({min(known, len(tokens)), len(tokens)}):
        assert index.find(tokens[:length]) == search(tokens[:length], shortest, shortest + further)


def test_guess_is_what_came_then():
    draft = NgramProposer(2, 4).propose(sequence_of([1, 2, 3, 4, 5, 9, 2, 3]), 3)
    assert draft is not None and draft.token_ids == [4, 5, 9]


def test_longer_match_goes_before_later_one():
    draft = NgramProposer(1, 4).propose(sequence_of([1, 2, 3, 7, 9, 3, 8, 1, 2, 3]), 1)
    assert draft is not None and draft.token_ids == [7]


def test_guess_goes_on_with_itself():
    draft = NgramProposer(2, 2).propose(sequence_of([5, 1, 2, 3, 1, 2, 3]), 7)
    assert draft is not None and draft.token_ids == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_to_find():
    assert NgramProposer(2, 4).propose(sequence_of([1, 2, 3]), 3) is None
    assert NgramProposer(2, 4).propose(sequence_of([1]), 3) is None


@pytest.mark.parametrize("bounds", [(0, 2), (3, 2)])
def test_bad_bounds(bounds):
    with pytest.raises(ValueError, match="prompt_lookup_min"):
        NgramProposer(*bounds)
