"""Checks and converts draft tokens and prompt embeddings of a request for the engine core."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from neso.engine.core.request import PLACEHOLDER, InputEmbeddings, RequestDraft
from neso.engine.ipc.messages import EngineInfo
from neso.engine.sampling.limits import check_tokens
from neso.generation import GenerationRequest, InvalidParameter, check_prompt_length

MAX_DRAFT_TOKENS = 128
"""Maximum number of draft tokens of a request. Each costs a row of logits, and the first rejected one ends the
draft.
"""


def checked_draft(request: GenerationRequest, vocab_size: int) -> RequestDraft | None:
    """Return the request's draft tokens for the engine core. Raises `InvalidParameter`."""
    draft = request.draft
    if draft is None:
        return None
    if not draft.input_ids:
        raise InvalidParameter("draft_input_ids", "is empty")
    if len(draft.input_ids) > MAX_DRAFT_TOKENS:
        raise InvalidParameter(
            "draft_input_ids", f"are {len(draft.input_ids)} tokens, at most {MAX_DRAFT_TOKENS} are supported"
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
    expected = (len(draft.input_ids), vocab_size)
    if logits.shape != expected:
        raise InvalidParameter(
            "draft_logits", f"must have the shape {list(expected)}, got {list(logits.shape)}"
        )
    if np.isnan(logits).any() or not np.isfinite(logits.max(axis=1)).all():
        raise InvalidParameter("draft_logits", "hold values that are not numbers")
    return RequestDraft(list(draft.input_ids), logits.tobytes(), threshold)


def embeddings_as_prompt(request: GenerationRequest, info: EngineInfo) -> tuple[list[int], InputEmbeddings]:
    """Return placeholder tokens and rows for `prompt_embeds`. Raises `InvalidParameter`."""
    if request.prompt:
        raise InvalidParameter("prompt_embeds", "is a whole prompt: 'prompt' must be empty beside it")
    if request.prompt_embedding_table is not None:
        raise InvalidParameter("prompt_embeds", "cannot be given with prompt_embedding_table")
    rows = _embedding_rows("prompt_embeds", request.prompt_embeds, info)
    positions = np.arange(len(rows), dtype=np.int32)
    return [PLACEHOLDER] * len(rows), InputEmbeddings.of(positions, rows)


def insert_virtual_tokens(
    request: GenerationRequest, token_ids: list[int], info: EngineInfo
) -> tuple[list[int], InputEmbeddings | None]:
    """Return the prompt with rows of `prompt_embedding_table` at its virtual tokens. Raises `InvalidParameter`."""
    table = _embedding_rows("prompt_embedding_table", request.prompt_embedding_table, info)
    size, vocab_size = request.prompt_vocab_size, info.vocab_size
    if size is not None and size != len(table):
        raise InvalidParameter(
            "prompt_vocab_size", f"is {size}, but prompt_embedding_table has {len(table)} rows"
        )
    if isinstance(request.prompt, str):
        token_ids = [*range(vocab_size, vocab_size + len(table)), *token_ids]
    check_prompt_length(len(token_ids), info.max_model_len)  # before the table's rows are repeated
    ids = np.array(token_ids, np.int64)
    virtual = np.flatnonzero(ids >= vocab_size).astype(np.int32)
    indices = ids[virtual] - vocab_size
    if len(indices) and indices.max() >= len(table):
        raise InvalidParameter(
            "prompt",
            f"token {indices.max() + vocab_size} is beyond the vocabulary of {vocab_size} and the {len(table)} "
            "rows of prompt_embedding_table",
        )
    ids[virtual] = PLACEHOLDER
    with_placeholders: list[int] = ids.tolist()
    return with_placeholders, InputEmbeddings.of(virtual, table[indices]) if len(virtual) else None


def _embedding_rows(
    field: str, values: npt.NDArray[np.floating] | None, info: EngineInfo
) -> npt.NDArray[np.float32]:
    """Check and convert embeddings to float32[rows, hidden_size]."""
    assert values is not None
    if "input_embeddings" not in info.capabilities:
        raise InvalidParameter(field, f"the runner of this model ({info.runner}) takes token ids only")
    rows = np.asarray(values)
    hidden_size = info.hidden_size
    if rows.ndim == 3 and len(rows) == 1:  # a batch of one
        rows = rows[0]
    if rows.ndim == 2 and len(rows) == 1 and hidden_size and rows.size % hidden_size == 0:
        rows = rows.reshape(-1, hidden_size)  # flat, from JSON
    if rows.ndim != 2 or rows.shape[1] != hidden_size or not len(rows):
        raise InvalidParameter(field, f"must have the shape [rows, {hidden_size}], not {list(rows.shape)}")
    if rows.dtype.kind not in "fV":  # bfloat16 has kind V
        raise InvalidParameter(field, f"must be of a float dtype, not {rows.dtype}")
    rows = rows.astype(np.float32)
    if not np.isfinite(rows).all():
        raise InvalidParameter(field, "has values that are not finite")
    return rows
