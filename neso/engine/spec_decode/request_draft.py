"""Drafts supplied with requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.core.request import EngineRequest
from neso.engine.sampling.token_sampling import probabilities_of
from neso.engine.spec_decode.draft import Draft
from neso.generation.sampling_params import SamplingParams


def draft_of(request: EngineRequest) -> Draft | None:
    """Return the draft supplied with a request, cut so that one more token can follow it."""
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
    """Distributions of a draft from the logits float32[N, V] supplied with it.

    Each is computed on first access, because those after the first rejected token are never used.
    """

    logits: npt.NDArray[np.float32]
    params: SamplingParams

    def __getitem__(self, number: int, /) -> npt.NDArray[np.float32]:
        return probabilities_of(self.logits[number], self.params).astype(np.float32)
