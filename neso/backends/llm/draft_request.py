"""Reads guessed tokens out of the tensors that TensorRT-LLM's backend has for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from neso.generation import DraftTokens
from neso.server.errors import InvalidArgument

DRAFT_NAMES = ("draft_input_ids", "draft_logits", "draft_acceptance_threshold")


def read_draft(ids: Any, logits: Any, threshold: Any) -> DraftTokens | None:
    """Of the values of `DRAFT_NAMES`, each an array, a list or None. Raises `InvalidArgument`."""
    if ids is None:
        if threshold is not None or logits is not None:
            raise InvalidArgument("draft_input_ids: must come with the other tensors of a draft")
        return None
    try:
        tokens = np.asarray(ids).reshape(-1)
        if tokens.size and tokens.dtype.kind not in "iu":
            raise ValueError("must be integers")
        return DraftTokens(
            tokens.tolist(),
            None if logits is None else np.asarray(logits, np.float32).reshape(len(tokens), -1),
            None if threshold is None else float(np.asarray(threshold).reshape(-1)[0]),
        )
    except (ValueError, TypeError, IndexError) as error:
        raise InvalidArgument(f"{', '.join(DRAFT_NAMES)}: {error}") from None
