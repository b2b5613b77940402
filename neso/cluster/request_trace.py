"""The spans of a traced request on engine workers: queue, prefill, kv_transfer and decode of each attempt."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from neso.engine.core.request import SequenceOutput
from neso.generation.output import FinishReason
from neso.generation.spans import Span

_NO_COUNTS: Mapping[str, str | int] = {}


@dataclass(slots=True)
class _Part:
    """What a worker does for an attempt. `first_output`: time of its first output; 0: there is none yet."""

    worker: str
    attempt: int
    granted: int
    first_output: int = 0
    num_tokens: int = 0
    steps: Counter[int] = field(default_factory=Counter)  # by sequence

    def span(
        self, name: str, start: int, end: int, error: str = "", counts: Mapping[str, str | int] = _NO_COUNTS
    ) -> Span:
        about = {"worker": self.worker, "attempt": self.attempt, **counts}
        return Span(name, start, max(start, end), about, error)


class RequestTrace:
    """Passes each span to `emit` when it has ended, so that those of lost workers are known.

    Times that a worker has measured must have been converted to the clock of this process.
    """

    def __init__(self, num_prompt_tokens: int, emit: Callable[[Span], None]) -> None:
        self._num_prompt_tokens, self._emit = num_prompt_tokens, emit
        self._waits_since = time.monotonic_ns()
        self._running: _Part | None = None
        self._prefilling: _Part | None = None  # a worker that computes the prompt for another one

    def granted(self, worker: str, attempt: int) -> None:
        """The request was given to a worker."""
        self._running = part = _Part(worker, attempt, time.monotonic_ns())
        self._emit(part.span("queue", self._waits_since, part.granted))

    def prefill_granted(self, worker: str, attempt: int) -> None:
        """Another worker computes the prompt."""
        self._prefilling = _Part(worker, attempt, time.monotonic_ns())

    def prefilled(self, output: SequenceOutput) -> None:
        """The other worker has computed the prompt, or could not."""
        part, self._prefilling = self._prefilling, None
        if part is not None:
            computed = max(0, output.exported_tokens - output.cached_tokens)
            counts = {"tokens": computed, "cached_tokens": output.cached_tokens}
            start = output.scheduled_ns or part.granted
            self._emit(part.span("prefill", start, time.monotonic_ns(), output.error, counts=counts))

    def prefill_lost(self, reason: str) -> None:
        """The other worker was lost before it had computed the prompt."""
        part, self._prefilling = self._prefilling, None
        if part is not None:
            self._emit(part.span("prefill", part.granted, time.monotonic_ns(), reason))

    def output(self, output: SequenceOutput) -> None:
        """The worker has sent an output of a step."""
        part = self._running
        if part is None:
            return
        part.num_tokens += len(output.token_ids)
        part.steps[output.index] += 1
        if not part.first_output and output.finish_reason is not FinishReason.ERROR:
            part.first_output = time.monotonic_ns()
            self._first_output(part, output)

    def _first_output(self, part: _Part, output: SequenceOutput) -> None:
        start, imported = output.scheduled_ns or part.granted, output.imported
        if imported is not None or output.import_error:
            about: dict[str, str | int] = {}
            if imported is not None:
                about = {
                    "transport": imported.transport,
                    "blocks": imported.blocks,
                    "missing_blocks": imported.missing,
                    "bytes": imported.num_bytes,
                }
            since, until = (
                (part.granted, start) if imported is None else (imported.started_ns, imported.ended_ns)
            )
            self._emit(part.span("kv_transfer", since, until, output.import_error, about))
        computed = self._num_prompt_tokens - output.cached_tokens - output.imported_tokens
        counts = {"tokens": max(0, computed), "cached_tokens": output.cached_tokens}
        self._emit(part.span("prefill", start, part.first_output, counts=counts))

    def attempt_lost(self, reason: str) -> None:
        """The attempt has ended without a result: the request waits for the next one. A prefill elsewhere goes on."""
        self._end_attempt(reason)
        self._waits_since = time.monotonic_ns()

    def ended(self, error: str = "") -> None:
        """The request has ended. `error`: why it has failed."""
        self._end_attempt(error)
        self.prefill_lost(error)  # if it was not awaited

    def _end_attempt(self, error: str) -> None:
        now = time.monotonic_ns()
        part, self._running = self._running, None
        if part is None:
            self._emit(Span("queue", self._waits_since, now, {}, error))
        elif not part.first_output:
            self._emit(part.span("prefill", part.granted, now, error))
        else:
            counts = {"steps": max(part.steps.values()), "tokens": part.num_tokens}
            self._emit(part.span("decode", part.first_output, now, error, counts=counts))
