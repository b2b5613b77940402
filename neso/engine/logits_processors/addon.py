"""Logits processors as an add-on of the engine core."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.core.addon import Addon, RequestError
from neso.engine.core.request import SequenceOutput
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence
from neso.engine.core.stats import LogitsProcessorStats
from neso.engine.core.step import ScheduledSequence, Step
from neso.engine.logits_processors.processor import LogitsProcessor, SequenceTokens
from neso.engine.runners.base import Logits

logger = logging.getLogger(__name__)

FIELD = "logits_processor"


@dataclass(slots=True)
class _Batch:
    """Logits rows of one processor in a step: row numbers, their sequences, and the tokens before each.

    `after_draft`: whether the tokens before a row end with draft tokens.
    """

    rows: list[int] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    tokens: list[SequenceTokens] = field(default_factory=list)
    after_draft: list[bool] = field(default_factory=list)


class LogitsProcessors(Addon):
    """Applies the processors that requests choose by name. State of a sequence: the processor's name."""

    def __init__(self, processors: Mapping[str, LogitsProcessor] | None = None) -> None:
        self._processors = dict(processors or {})
        self._stats = {name: LogitsProcessorStats() for name in self._processors}

    def admit(self, sequence: Sequence) -> None:
        name = sequence.request.sampling.logits_processor
        if name is None:
            return
        if name not in self._processors:
            known = ", ".join(self._processors) or "none"
            raise RequestError(
                f"{FIELD}: '{name}' is not registered with the model; registered: {known}", FIELD
            )
        sequence.addons[self] = name
        sequence.sync_only = True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        if self in parent.addons:
            child.addons[self] = parent.addons[self]
            child.error = parent.error

    def update(self, step: Step, logits: Logits, scheduler: Scheduler) -> list[SequenceOutput]:
        batches: dict[str, _Batch] = {}
        row = 0
        for scheduled in step.sampled:
            sequence = scheduled.sequence
            name = sequence.addons.get(self)
            num_rows = 1 + scheduled.num_draft_tokens + sequence.forks_pending
            if name is not None:
                batch = batches.setdefault(name, _Batch())
                batch.rows += range(row, row + num_rows)
                batch.sequences += [sequence] * num_rows
                batch.tokens += _tokens_before_rows(scheduled)
                batch.after_draft += [0 < i <= scheduled.num_draft_tokens for i in range(num_rows)]
            row += num_rows
        for name, batch in batches.items():
            self._apply(name, batch, logits)
        return []

    def _apply(self, name: str, batch: _Batch, logits: Logits) -> None:
        """Process rows of logits. A sequence for which the processor raises fails when its next token is selected."""
        processor, stats = self._processors[name], self._stats[name]
        original = np.array(logits[batch.rows])
        processed = original.copy()
        started = time.perf_counter()
        try:
            processor(processed, batch.tokens)
        except Exception as error:
            if len(batch.rows) == 1:
                self._fail(name, batch.sequences[0], error)
            else:
                processed = self._apply_to_each(name, batch, original)
        stats.seconds += time.perf_counter() - started
        stats.rows += len(batch.rows)
        for row, values in zip(batch.rows, processed, strict=True):
            logits[row] = values

    def _apply_to_each(
        self, name: str, batch: _Batch, original: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """Process each row alone, so that only the requests fail for which the processor raises.

        A row after draft tokens gets NaN instead, so that no token is sampled from it: the draft tokens may be wrong.
        If they are accepted, the next step processes the row again.
        """
        processed = original.copy()
        for i, (sequence, tokens) in enumerate(zip(batch.sequences, batch.tokens, strict=True)):
            try:
                self._processors[name](processed[i : i + 1], [tokens])
            except Exception as error:
                if batch.after_draft[i]:
                    processed[i] = np.nan
                else:
                    processed[i] = original[i]
                    self._fail(name, sequence, error)
        return processed

    def _fail(self, name: str, sequence: Sequence, error: Exception) -> None:
        self._stats[name].failures += 1
        logger.warning(
            "logits processor '%s' failed for request '%s'",
            *(name, sequence.request.request_id),
            exc_info=error,
        )
        sequence.error = RequestError(f"the logits processor '{name}' failed: {error}")

    def stats(self) -> dict[str, Any]:
        if not self._stats:
            return {}
        return {"logits_processors": {name: stats.copy() for name, stats in self._stats.items()}}


def _tokens_before_rows(scheduled: ScheduledSequence) -> list[SequenceTokens]:
    """Return the tokens before each logits row: of the known tokens, its repetitions for forks, each draft token."""
    sequence = scheduled.sequence
    request_id, start = sequence.request.request_id, sequence.num_prompt_tokens
    prompt, output = sequence.token_ids[:start], sequence.token_ids[start:]
    known = SequenceTokens(request_id, prompt, output)
    drafts = []
    if scheduled.draft is not None:
        paths = map(scheduled.draft.path, range(scheduled.num_draft_tokens))
        drafts = [SequenceTokens(request_id, prompt, output + path) for path in paths]
    return [known, *drafts] + [known] * sequence.forks_pending
