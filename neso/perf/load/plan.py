"""Load plan of one run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from neso.perf.errors import PerfError


class Arrival(str, Enum):
    """Distribution of the time between the starts of two requests, for a request rate."""

    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One phase of load over all workers. Without `rate` and `schedule` it is a closed loop.

    - concurrency: maximum number of sessions in flight; 0 is no limit, for a rate or a schedule
    - rate: sessions per second; those that exceed `concurrency` wait, and their latency counts from the intended start
    - users: with a rate, this number of users sends its requests; each sends one every `users / rate` seconds, turn
      after turn and session after session. 0 is a rate of sessions
    - prefill_concurrency: maximum number of requests that wait for their first token; 0 is no limit
    - arrival, smoothness: distribution of intervals. The coefficient of variation of a gamma distribution is
      1 / sqrt(smoothness): 1 is Poisson, more is smoother, less is burstier
    - schedule: start at the timestamps of the requests
    - requests, sessions: number to send; seconds: time in which requests start; None is no limit
    - grace_seconds: time after `seconds` until requests in flight are cancelled; None waits for all
    - ramp_seconds: time in which the concurrency or rate grows linearly from 0
    - stable_percent: stop when throughput and latency of three windows of `window_seconds` differ from their mean by at
      most this percentage, or after `max_windows`; 0 is off
    - cancel_percent, cancel_seconds: percentage of requests to cancel, and time from their start to cancellation
    - warm_up: its records are marked
    """

    concurrency: int = 1
    rate: float | None = None
    users: int = 0
    prefill_concurrency: int = 0
    arrival: Arrival = Arrival.CONSTANT
    smoothness: float = 1.0
    schedule: bool = False
    requests: int | None = None
    sessions: int | None = None
    seconds: float | None = None
    grace_seconds: float | None = None
    ramp_seconds: float = 0.0
    stable_percent: float = 0.0
    window_seconds: float = 5.0
    window_requests: int = 0
    max_windows: int = 10
    cancel_percent: float = 0.0
    cancel_seconds: float = 0.0
    seed: int = 0
    warm_up: bool = False

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise PerfError(f"a request rate must be positive, got {self.rate}")
        if self.users and self.rate is None:
            raise PerfError("users need a rate")
        if self.concurrency < 1 and self.rate is None and not self.schedule:
            raise PerfError(f"the concurrency must be at least 1, got {self.concurrency}")
        if self.smoothness <= 0:
            raise PerfError(f"the arrival smoothness must be positive, got {self.smoothness}")
        if not 0 <= self.cancel_percent <= 100:
            raise PerfError(f"the cancellation rate must be between 0 and 100, got {self.cancel_percent}")

    @property
    def turn_gap_ns(self) -> int:
        """Time between the starts of two turns of a user, in nanoseconds; 0 without users."""
        return int(self.users / self.rate * 1e9) if self.users and self.rate else 0

    @property
    def is_open_loop(self) -> bool:
        """Whether requests start at given times, not when others end."""
        return self.rate is not None or self.schedule
