"""Drafts that come with a request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.core.draft import Draft
from neso.engine.core.request import EngineRequest, RequestDraft
from neso.engine.sampling.limits import check_tokens
from neso.engine.spec_decode.verification import probabilities_of
from neso.generation import GenerationRequest, InvalidParameter
from neso.generation.sampling_params import SamplingParams

MAX_DRAFT_TOKENS = 128
"""Of a request: the first wrong one ends a draft, and each costs a row of logits until then."""


def checked_draft(request: GenerationRequest, vocab_size: int) -> RequestDraft | None:
    """The draft of a request as it goes to the engine core. Raises `InvalidParameter`."""
    draft = request.draft
    if draft is None:
        return None
    if not draft.input_ids:
        raise InvalidParameter("draft_input_ids", "is empty")
    if len(draft.input_ids) > MAX_DRAFT_TOKENS:
        raise InvalidParameter(
            "draft_input_ids", f"are {len(draft.input_ids)} tokens, at most {MAX_DRAFT_TOKENS} can be guessed"
        )
    if request.sampling.num_sequences > 1:
        raise InvalidParameter("draft_input_ids", "need n and best_of 1 and no beam search")
    check_tokens("draft_input_ids", draft.input_ids, vocab_size)
    threshold = draft.acceptance_threshold
    if threshold is not None and not 0 < threshold <= 1:
        raise InvalidParameter(
            "draft_acceptance_threshold", f"must be more than 0 and at most 1, got {threshold}"
        )
    if draft.logits is None:
        return RequestDraft(list(draft.input_ids), None, threshold)
    logits = np.asarray(draft.logits, np.float32)
    wanted = (len(draft.input_ids), vocab_size)
    if logits.shape != wanted:
        raise InvalidParameter(
            "draft_logits", f"must have the shape {list(wanted)}, got {list(logits.shape)}"
        )
    if np.isnan(logits).any() or not np.isfinite(logits.max(axis=1)).all():
        raise InvalidParameter("draft_logits", "hold values that are not numbers")
    return RequestDraft(list(draft.input_ids), logits.tobytes(), threshold)


def draft_of(request: EngineRequest) -> Draft | None:
    """The draft of a request as its sequence has it: one token must be left to come behind it."""
    given = request.draft
    if given is None or request.max_tokens < 2:
        return None
    token_ids = given.token_ids[: request.max_tokens - 1]
    probabilities = None
    if given.logits is not None:
        rows = np.frombuffer(given.logits, np.float32).reshape(len(given.token_ids), -1)
        probabilities = _RowsOfLogits(rows, request.sampling)
    return Draft(token_ids, probabilities=probabilities, acceptance_threshold=given.acceptance_threshold)


@dataclass(frozen=True, slots=True, eq=False)
class _RowsOfLogits:
    """The distributions of a draft whose logits float32[N, V] came with it, each made where it is asked for: those
    behind the first wrong token never are."""

    logits: npt.NDArray[np.float32]
    params: SamplingParams

    def __getitem__(self, number: int, /) -> npt.NDArray[np.float32]:
        return probabilities_of(self.logits[number], self.params).astype(np.float32)
