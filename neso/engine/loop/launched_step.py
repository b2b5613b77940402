"""A step that was started and not waited for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from neso.engine.core.schedule import Schedule
from neso.engine.core.sequence import Sequence
from neso.engine.core.stats import StepCounts
from neso.engine.runners.base import LaunchedTokens
from neso.engine.sampling.state import SamplingState
from neso.generation.sampling_params import SamplingParams


@dataclass(slots=True)
class LaunchedStep:
    """`pending`: the sequences that get a token by it, in the order of the tokens, and its position in each."""

    schedule: Schedule
    counts: StepCounts
    tokens: LaunchedTokens
    states: list[SamplingState]
    pending: list[tuple[Sequence, int]] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def append_pending(self, sampled: list[Sequence]) -> None:
        """Append what stands for the unknown tokens, so that the next step can be scheduled."""
        for row, sequence in enumerate(sampled):
            self.pending.append((sequence, sequence.num_tokens))
            sequence.token_ids.append(-1 - row)

    def seconds_since(self, last_finished: float) -> float:
        """How long it has had the runner: it began when the step before was done, or when it was started."""
        return time.perf_counter() - max(self.started, last_finished)


def can_run_ahead(params: SamplingParams) -> bool:
    """Whether a token can be chosen before those ahead of it are known to the host, and needs nothing but a choice."""
    return (
        params.num_sequences == 1
        and not params.needs_token_scores
        and not params.needs_prompt_scores
        and params.guided_decoding is None
        and params.repetition_penalty == 1.0
        and params.top_p_decay == 1.0
        and params.allowed_token_ids is None
        and not (params.presence_penalty or params.frequency_penalty or params.min_tokens)
        and not (
            params.logit_bias or params.embedding_bias or params.bad_words or params.no_repeat_ngram_size
        )
    )
