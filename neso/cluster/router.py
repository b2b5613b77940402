"""Which waiting request goes to which worker: functions of the state of the queue and the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from neso.cluster.work_queue import Job, WorkerState
from neso.engine.client.engine_load import LeastCost
from neso.engine.cluster_config import DECODE, PREFILL

MAX_DELAY = 0.05
"""Seconds that a request waits at most for a busy worker that holds its prefix or its adapter."""

UNMEASURED_REMOTE_PREFILL = 256
"""Minimum number of uncached tokens of a prompt that another worker computes, before times were measured."""

_EXTRAPOLATION = 4
"""A worker's measured times predict those of prompts up to this many times as long as the mean one."""
_NOISE = 1.4
_MAX_AGE = 60.0
"""Seconds after which a measurement no longer counts."""


class Choice(NamedTuple):
    """`job` goes to `worker` now; None: nothing can start. `wake`: when a waiting request has waited long enough.

    `prefiller`: worker that computes the prompt; None: `worker` does, or the request has an export already.
    """

    job: Job | None = None
    worker: WorkerState | None = None
    prefiller: WorkerState | None = None
    wake: float | None = None


class Queue(NamedTuple):
    """What a choice depends on. `num_behind`: requests behind the one that is chosen for; `now`: in seconds."""

    workers: Sequence[WorkerState]
    num_behind: int
    now: float


class Router:
    """Delay scheduling: a request waits a moment for the worker where it costs least, then goes to any other.

    Costs are prompt tokens that the worker's cache does not hold, and the work in front of the request, see `Load`,
    multiplied by the measured slowness of the worker. If another worker computes the prompt, the time of the transfer
    takes the place of the tokens. A
    request for which no worker has room holds up those behind it, so a large one is not overtaken forever. A request
    whose prompt is computed elsewhere starts when both workers have room, so neither waits for the other one.

    - min_remote_prefill: prompts with fewer tokens outside the cache are computed by the worker that decodes; None: by
      measured times, see `remote_pays`
    - may_start: whether a worker may get a request, beside its room
    """

    def __init__(
        self,
        min_remote_prefill: int | None = None,
        may_start: Callable[[Job, WorkerState], bool] = lambda job, worker: True,
    ) -> None:
        self._min_remote_prefill, self._may_start = min_remote_prefill, may_start
        self._choose = LeastCost()

    def choose(self, window: Sequence[Job], workers: Sequence[WorkerState], now: float) -> Choice:
        """Choose the next grant among the oldest waiting requests. `now`: in seconds of the clock of the queue."""
        wake: float | None = None
        measure_slowness(workers, now)
        decoders = [worker for worker in workers if "decode" in worker.roles]
        for index, job in enumerate(window):
            queue = Queue(workers, len(window) - 1 - index, now)
            free = [worker for worker in decoders if self._can_start(job, worker, queue)]
            if not free:
                break
            best = min(decoders, key=partial(self._cost, job, queue))
            if best not in free:
                ready = job.waiting_since + worthwhile_delay(job, best, free)
                if now < ready:
                    wake = ready if wake is None else min(wake, ready)
                    continue
            worker = self._choose(job, free)
            if self._prefiller(job, worker, queue) is not None:
                worker = min(free, key=partial(self._cost, job, queue))
            return Choice(job, worker, self._prefiller(job, worker, queue))
        return Choice(wake=wake)

    def _cost(self, job: Job, queue: Queue, worker: WorkerState) -> tuple[float, int]:
        """Return the cost of generating the text on a worker, and when it got its last request."""
        remote = job.export is not None or bool(self.prefillers(job, worker, queue))
        return worker.import_cost(job) if remote else worker.cost(job), worker.last_added

    def prefillers(self, job: Job, worker: WorkerState, queue: Queue) -> list[WorkerState]:
        """Return the workers that may compute the prompt for `worker`; none if it computes the prompt itself."""
        others = possible_prefillers(worker, queue.workers) if job.can_import else []
        if self._min_remote_prefill is not None:
            remote = worker.uncached_tokens(job) >= max(1, self._min_remote_prefill)
        else:
            remote = bool(others) and remote_pays(job, worker, others, queue)
        return others if remote else []

    def is_fallback(self, job: Job, worker: WorkerState, workers: Sequence[WorkerState]) -> bool:
        """Whether a decode worker computes a long prompt only because there is no other worker for it."""
        if worker.roles != DECODE or not job.can_import or possible_prefillers(worker, workers):
            return False
        limit = UNMEASURED_REMOTE_PREFILL if self._min_remote_prefill is None else self._min_remote_prefill
        return worker.uncached_tokens(job) >= max(1, limit)

    def _can_start(self, job: Job, worker: WorkerState, queue: Queue) -> bool:
        if not self._may_start(job, worker):
            return False
        if job.export is not None:
            return worker.has_room(job, remote=True)
        prefillers = self.prefillers(job, worker, queue)
        if any(one.has_room(job) for one in prefillers):
            return worker.has_room(job, remote=True)
        return (not prefillers or "prefill" in worker.roles) and worker.has_room(job)

    def _prefiller(self, job: Job, worker: WorkerState, queue: Queue) -> WorkerState | None:
        if job.export is not None:
            return None
        free = [one for one in self.prefillers(job, worker, queue) if one.has_room(job)]
        return self._choose(job, free) if free else None


def possible_prefillers(worker: WorkerState, workers: Sequence[WorkerState]) -> list[WorkerState]:
    """Return the other workers that can compute prompts for `worker`.

    Workers that only compute prompts are preferred; a worker that does both needs no other one that does both.
    """
    others = [one for one in workers if "prefill" in one.roles and one is not worker]
    only = [one for one in others if one.roles == PREFILL]
    return only or (others if worker.roles == DECODE else [])


def remote_pays(job: Job, worker: WorkerState, prefillers: Sequence[WorkerState], queue: Queue) -> bool:
    """Whether requests wait less in total if one of `prefillers` computes a prompt for `worker`, by measured times.

    - remote: the prompts before it and its own on the best prefill worker, the transfer, and a step of `worker`; each
      request behind it in the queue waits for its prompt, divided by the number of prefill workers
    - local: the prompts before it and its own on `worker`, whose other sequences each wait for its prompt

    Before enough prompts were measured within the last minute, prompts of at least `UNMEASURED_REMOTE_PREFILL` tokens
    are remote.
    """
    own = worker.uncached_tokens(job)
    measured = [one for one in prefillers if queue.now - one.measured_at < _MAX_AGE and one.speed.known]
    if not measured:
        return own >= UNMEASURED_REMOTE_PREFILL

    def seconds(one: WorkerState) -> float:
        return one.speed.seconds_for(one.num_prefill_tokens + one.uncached_tokens(job))

    best = min(measured, key=seconds)
    remote = seconds(best) + worker.transfer_seconds(own) + worker.itl
    remote += best.seconds_per_token * best.uncached_tokens(job) * queue.num_behind / len(prefillers)
    size = worker.num_prefill_tokens + own
    # A line through short prompts says little about long ones.
    fits = worker.speed.known and size <= _EXTRAPOLATION * worker.speed.mean_size
    speed = worker.speed if fits and queue.now - worker.measured_at < _MAX_AGE else best.speed
    local = speed.seconds_for(size) + speed.slope * own * worker.num_sequences
    return remote < local


def measure_slowness(workers: Sequence[WorkerState], now: float) -> None:
    """Compare the times that the workers need for a prompt of mean length with that of the fastest one.

    Differences below a factor of 1.4 do not count, they are noise. A worker that was not measured for a minute counts
    as fast: it would never be measured again if it got no requests.
    """
    measured = [worker for worker in workers if now - worker.measured_at < _MAX_AGE]
    length = sum(worker.speed.mean_size for worker in measured) / max(1, len(measured))
    times = [worker.speed.seconds_for(length) for worker in measured]
    fastest = min((seconds for seconds in times if seconds), default=0.0)
    for worker in workers:
        worker.slowness = 1.0
    for worker, seconds in zip(measured, times, strict=True):
        if seconds > _NOISE * fastest:
            worker.slowness = seconds / fastest


def worthwhile_delay(job: Job, best: WorkerState, others: Sequence[WorkerState]) -> float:
    """Return the seconds that a request may wait for `best`, which is busy: what it saves, at most `MAX_DELAY`."""
    other = min(others, key=lambda worker: worker.uncached_tokens(job))
    saved = other.uncached_tokens(job) - best.uncached_tokens(job)
    return min(MAX_DELAY, max(0.0, saved * other.seconds_per_token))
