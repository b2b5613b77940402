"""Start times of an open loop."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from neso.perf.errors import PerfError
from neso.perf.load.plan import Arrival, LoadPlan
from neso.perf.requests import PerfRequest

_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class SessionStart:
    """Start of a session of users.

    - number: of the session
    - offset_ns: since the start of the load
    - turns: number of its turns to send
    - first_request: number of its first request; each further turn adds the number of users
    """

    number: int
    offset_ns: int
    turns: int
    first_request: int


def user_arrivals(plan: LoadPlan, num_turns: Callable[[int], int]) -> Iterator[SessionStart]:
    """Yield the starts of the sessions of `plan.users` users, in the order of time, without end.

    Each user has a request every `plan.turn_gap_ns`, and users are spread evenly over this time. Their first sessions
    have fewer turns, from one to all, as if the load had begun earlier. `num_turns` returns the turns of a session.
    """
    done = np.random.default_rng(plan.seed).permutation(plan.users)
    slots = [(user, user) for user in range(plan.users)]  # (number of the next request, user); already a heap
    number = 0
    while True:
        request, user = heapq.heappop(slots)
        turns = num_turns(number)
        if request < plan.users:
            turns -= turns * int(done[user]) // plan.users
        assert plan.rate is not None
        yield SessionStart(number, int(request / plan.rate * 1e9), turns, request)
        heapq.heappush(slots, (request + turns * plan.users, user))
        number += 1


def rate_arrivals(plan: LoadPlan) -> Iterator[tuple[int, int]]:
    """Yield (number, nanoseconds since the start of the load) of an endless arrival process.

    The sequence depends only on the plan. Each worker computes the whole sequence and takes its share, so the workers
    together keep the exact rate without communication.
    """
    assert plan.rate is not None
    rng = np.random.default_rng(plan.seed)
    number, reached = 0, 0.0
    while True:
        intervals = _unit_intervals(plan, rng)
        units = reached + np.cumsum(intervals)
        reached = float(units[-1])
        # The first request of a constant rate starts at once, as the interval before it would only delay the run.
        seconds = _time_of(
            units - 1.0 if plan.arrival is Arrival.CONSTANT else units, plan.rate, plan.ramp_seconds
        )
        for ns in (seconds * 1e9).astype(np.int64).tolist():
            yield number, ns
            number += 1


def _unit_intervals(plan: LoadPlan, rng: np.random.Generator) -> np.ndarray:
    """Return intervals of a process with one arrival per unit of time on average."""
    if plan.arrival is Arrival.CONSTANT:
        return np.ones(_CHUNK)
    if plan.arrival is Arrival.POISSON:
        return rng.exponential(1.0, _CHUNK)
    return rng.gamma(plan.smoothness, 1 / plan.smoothness, _CHUNK)


def _time_of(units: np.ndarray, rate: float, ramp: float) -> np.ndarray:
    """Return when a process with `rate`, which grows linearly from 0 during `ramp`, has made `units` arrivals."""
    if ramp <= 0:
        return np.asarray(units / rate)
    in_ramp = rate * ramp / 2
    return np.where(
        units < in_ramp, np.sqrt(np.maximum(units, 0) * 2 * ramp / rate), ramp + (units - in_ramp) / rate
    )


def scheduled_arrivals(sessions: Sequence[list[PerfRequest]]) -> Iterator[tuple[int, int]]:
    """Yield (number, nanoseconds since the start) by the timestamps of the sessions, relative to the first of them.

    Raises `PerfError` if a session has no timestamp.
    """
    stamps = [session[0].timestamp_ms for session in sessions]
    if any(stamp is None for stamp in stamps):
        missing = next(i for i, stamp in enumerate(stamps) if stamp is None)
        raise PerfError(f"a fixed schedule needs a timestamp for each request; entry {missing + 1} has none")
    times = np.array(stamps, float)
    times = (times - times.min()) * 1e6
    for number in np.argsort(times, kind="stable").tolist():
        yield number, int(times[number])
