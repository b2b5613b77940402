"""Which waiting request goes to which worker: functions of the state of the queue and the workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from neso.cluster.work_queue import Job, WorkerState
from neso.engine.client.engine_load import LeastCost

MAX_DELAY = 0.05
"""Seconds that a request waits at most for a busy worker that holds its prefix or its adapter."""


class Choice(NamedTuple):
    """`job` goes to `worker` now; None: nothing can start. `wake`: when a waiting request has waited long enough."""

    job: Job | None = None
    worker: WorkerState | None = None
    wake: float | None = None


class Router:
    """Delay scheduling: a request waits a moment for the worker where it costs least, then goes to any other.

    Costs are prompt tokens that the worker's cache does not hold, and the work in front of the request, see `Load`. A
    request for which no worker has room holds up those behind it, so a large one is not overtaken forever.
    """

    def __init__(self) -> None:
        self._choose = LeastCost()

    def choose(self, window: Sequence[Job], workers: Sequence[WorkerState], now: float) -> Choice:
        """Choose the next grant among the oldest waiting requests. `now`: in seconds of the clock of the queue."""
        wake: float | None = None
        for job in window:
            free = [worker for worker in workers if worker.has_room(job)]
            if not free:
                break
            best = min(workers, key=lambda worker: worker.cost(job))
            if best in free:
                return Choice(job, self._choose(job, free))
            ready = job.waiting_since + worthwhile_delay(job, best, free)
            if now >= ready:
                return Choice(job, self._choose(job, free))
            wake = ready if wake is None else min(wake, ready)
        return Choice(wake=wake)


def worthwhile_delay(job: Job, best: WorkerState, others: Sequence[WorkerState]) -> float:
    """Return the seconds that a request may wait for `best`, which is busy: what it saves, at most `MAX_DELAY`."""
    other = min(others, key=lambda worker: worker.uncached_tokens(job))
    saved = other.uncached_tokens(job) - best.uncached_tokens(job)
    return min(MAX_DELAY, max(0.0, saved * other.seconds_per_token))
