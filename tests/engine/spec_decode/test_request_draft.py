"""Drafts of requests: their distributions are computed when needed."""

from __future__ import annotations

import numpy as np
import pytest

from neso.engine.client.request_arrays import MAX_DRAFT_TOKENS, checked_draft
from neso.engine.core.request import EngineRequest, RequestDraft
from neso.engine.spec_decode import request_draft
from neso.engine.spec_decode.request_draft import draft_of
from neso.generation import DraftTokens, GenerationRequest, InvalidParameter, SamplingParams

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
