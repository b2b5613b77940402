"""What a step says of prompts: log probabilities of their tokens, and logits of their positions."""

from __future__ import annotations

import numpy as np

from neso.engine.core.batch import Batch, PromptRows
from neso.engine.core.request import SequenceOutput
from neso.engine.runners.base import Logits
from neso.engine.sampling.logprobs import position_logprobs


def prompt_outputs(batch: Batch, logits: Logits) -> list[SequenceOutput]:
    """One output for each prompt that asks for it; a prompt may take several steps."""
    return [_output(rows, logits) for rows in batch.prompt_rows]


def _output(rows: PromptRows, logits: Logits) -> SequenceOutput:
    request, params = rows.sequence.request, rows.sequence.request.sampling
    values = np.asarray(logits[rows.start : rows.end])
    scored = params.prompt_logprobs is not None and bool(rows.targets)
    return SequenceOutput(
        request_id=request.request_id,
        index=rows.sequence.index,
        token_ids=[],
        prompt_logprobs=(
            position_logprobs(values[: len(rows.targets)], rows.targets, params.prompt_logprobs or 0)
            if scored
            else []
        ),
        context_logits=values.tobytes() if params.return_context_logits else b"",
    )
