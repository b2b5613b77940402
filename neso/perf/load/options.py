"""Options of the load, with their flags. Names and aliases are those of genai-perf, perf_analyzer and aiperf."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from neso.flags import SWITCH, Flag, Kind, SameAs, integer, number
from neso.perf.errors import PerfError
from neso.perf.load.plan import Arrival, LoadPlan

_SECONDS = number(0)
_COUNT = integer(1)
_DEFAULT_STABILITY_PERCENT = 10.0
_WARM_UP = "Warm-up"


def _list_of(kind: Kind) -> Kind:
    """Return the kind of a comma-separated list, or of a range START:END[:STEP] as in perf_analyzer."""

    def parse(text: str) -> tuple[Any, ...]:
        if ":" not in text:
            return tuple(kind.parse(part.strip()) for part in text.split(","))
        parts = [kind.parse(part) for part in text.split(":")]
        if not 2 <= len(parts) <= 3 or (len(parts) == 3 and parts[2] <= 0) or parts[1] < parts[0]:
            raise ValueError(f"expected START:END:STEP, got '{text}'")
        values, step = [parts[0]], parts[2] if len(parts) == 3 else 1
        while values[-1] + step <= parts[1]:
            values.append(values[-1] + step)
        return tuple(values)

    return Kind(f"{kind.metavar}[,...]", parse)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The load of all runs. Lists define a sweep with one run for each value, or pair of values."""

    concurrency: Annotated[
        tuple[int, ...],
        Flag(
            "concurrency",
            "Number of requests (or sessions) in flight. With a rate, the maximum; further requests wait.",
            _list_of(_COUNT),
            aliases=("concurrency-range", "session-concurrency", "max-concurrency"),
            default_text="1; no limit for a rate or schedule",
            convert=lambda values: values or (),
        ),
    ] = ()
    request_rate: Annotated[
        tuple[float, ...],
        Flag(
            "request-rate",
            "Requests (or sessions) started per second.",
            _list_of(number(1e-9)),
            aliases=("request-rate-range",),
            convert=lambda values: values or (),
        ),
    ] = ()
    arrival: Annotated[
        Arrival,
        Flag(
            "arrival-pattern",
            "Distribution of the intervals of a rate.",
            aliases=("request-distribution", "request-rate-mode"),
        ),
    ] = Arrival.POISSON
    smoothness: Annotated[
        float,
        Flag(
            "arrival-smoothness",
            "Shape of the gamma distribution: 1 is Poisson, more is smoother, less is burstier.",
            number(1e-6),
            aliases=("vllm-burstiness", "burstiness"),
        ),
    ] = 1.0
    user_centric_rate: Annotated[
        tuple[float, ...],
        Flag(
            "user-centric-rate",
            "Requests per second of --num-users together. Each user sends turn after turn and session after session, "
            "evenly, and never before the last response. Delays between turns are not used.",
            _list_of(number(1e-9)),
            convert=lambda values: values or (),
        ),
    ] = ()
    num_users: Annotated[int | None, Flag("num-users", "Number of users of --user-centric-rate.", _COUNT)] = (
        None
    )
    prefill_concurrency: Annotated[
        tuple[int, ...],
        Flag(
            "prefill-concurrency",
            "Maximum number of requests that wait for their first token; further requests wait. With --streaming.",
            _list_of(_COUNT),
            default_text="no limit",
            convert=lambda values: values or (),
        ),
    ] = ()
    fixed_schedule: Annotated[
        bool, Flag("fixed-schedule", "Start requests at the timestamps of the input file.", SWITCH)
    ] = False
    request_count: Annotated[
        int | None,
        Flag("request-count", "Number of requests of each run.", _COUNT, aliases=("num-requests",)),
    ] = None
    duration: Annotated[
        float | None, Flag("benchmark-duration", "Length of each run, in seconds.", number(0.01))
    ] = None
    grace_period: Annotated[
        float | None,
        Flag(
            "benchmark-grace-period",
            "Time after the duration until requests in flight are cancelled, in seconds.",
            _SECONDS,
            default_text="until all are complete",
        ),
    ] = None
    concurrency_ramp: Annotated[
        float,
        Flag(
            "concurrency-ramp-duration",
            "Time in which the concurrency grows to its value, in seconds.",
            _SECONDS,
        ),
    ] = 0.0
    rate_ramp: Annotated[
        float,
        Flag(
            "request-rate-ramp-duration", "Time in which the rate grows to its value, in seconds.", _SECONDS
        ),
    ] = 0.0
    measurement_interval: Annotated[
        float | None,
        Flag(
            "measurement-interval",
            "Length of a window, in milliseconds. Without count or duration, the run ends when three windows agree.",
            number(1),
            default_text="5000",
        ),
    ] = None
    measurement_requests: Annotated[
        int | None,
        Flag("measurement-request-count", "Size of a window in requests instead of time.", _COUNT),
    ] = None
    stability_percentage: Annotated[
        float | None,
        Flag(
            "stability-percentage",
            "Maximum difference of the throughput and latency of three windows from their mean, in percent.",
            number(0.001),
            default_text="10",
        ),
    ] = None
    max_trials: Annotated[int, Flag("max-trials", "Maximum number of windows.", integer(3))] = 10
    num_runs: Annotated[
        int, Flag("num-profile-runs", "Number of times that each load is repeated.", _COUNT)
    ] = 1
    cancel_percent: Annotated[
        float,
        Flag("request-cancellation-rate", "Percentage of the requests that the client cancels.", _SECONDS),
    ] = 0.0
    cancel_seconds: Annotated[
        float,
        Flag(
            "request-cancellation-delay",
            "Time from the start of a request to its cancellation, in seconds.",
            _SECONDS,
        ),
    ] = 0.0
    warm_up_requests: Annotated[
        int | None,
        Flag("warmup-request-count", "Number of requests before each run that are not counted.", _COUNT,
             aliases=("num-warmup-requests",), topic=_WARM_UP),
    ] = None  # fmt: skip
    warm_up_duration: Annotated[
        float | None,
        Flag("warmup-duration", "Length of the warm-up, in seconds.", number(0.01), topic=_WARM_UP),
    ] = None
    warm_up_grace_period: Annotated[
        float | None,
        Flag(
            "warmup-grace-period",
            "Grace period of the warm-up, like --benchmark-grace-period.",
            _SECONDS,
            topic=_WARM_UP,
        ),
    ] = None
    warm_up_concurrency: Annotated[
        int | None,
        Flag(
            "warmup-concurrency",
            "Concurrency of the warm-up.",
            _COUNT,
            default_text="that of the run",
            topic=_WARM_UP,
        ),
    ] = None
    warm_up_rate: Annotated[
        float | None,
        Flag(
            "warmup-request-rate",
            "Rate of the warm-up.",
            number(1e-9),
            default_text="that of the run",
            topic=_WARM_UP,
        ),
    ] = None
    workers: Annotated[
        int | None,
        Flag(
            "workers",
            "Number of client processes.",
            _COUNT,
            aliases=("workers-max", "max-workers", "max-threads"),
            default_text="one per 64 requests in flight, at most half of the cores",
        ),
    ] = None
    seed: Annotated[int, SameAs("random-seed")] = 0

    def __post_init__(self) -> None:
        if self.fixed_schedule and (self.request_rate or self.concurrency or self.user_centric_rate):
            raise PerfError(
                "--fixed-schedule: cannot be combined with --request-rate, --user-centric-rate or --concurrency"
            )
        if self.request_rate and self.user_centric_rate:
            raise PerfError("--user-centric-rate: cannot be combined with --request-rate")
        if bool(self.user_centric_rate) != bool(self.num_users):
            raise PerfError("--user-centric-rate and --num-users must be given together")
        if self.user_centric_rate and self.rate_ramp:
            raise PerfError("--request-rate-ramp-duration: cannot be combined with --user-centric-rate")
        if self.cancel_percent > 100:
            raise PerfError(f"--request-cancellation-rate: expected at most 100, got {self.cancel_percent:g}")
        if self.smoothness != 1.0 and self.arrival is not Arrival.GAMMA:
            raise PerfError("--arrival-smoothness: only with --arrival-pattern gamma")
        if self.grace_period is not None and self.duration is None:
            raise PerfError("--benchmark-grace-period: only with --benchmark-duration")

    def loads(self) -> Iterator[tuple[LoadPlan, LoadPlan | None]]:
        """Yield the plan of each run of the sweep, without repetitions, with that of its warm-up."""
        for rate in self.request_rate or self.user_centric_rate or (None,):
            for concurrency in self.concurrency or (1 if rate is None and not self.fixed_schedule else 0,):
                for prefill_concurrency in self.prefill_concurrency or (0,):
                    plan = self._plan(concurrency, rate, prefill_concurrency)
                    yield plan, self._warm_up(plan)

    def _plan(self, concurrency: int, rate: float | None, prefill_concurrency: int) -> LoadPlan:
        is_limited = self.request_count is not None or self.duration is not None or self.fixed_schedule
        wants_stability = self.stability_percentage is not None or self.measurement_interval is not None
        stable = 0.0
        if not is_limited or (wants_stability and not self.fixed_schedule):
            stable = self.stability_percentage or _DEFAULT_STABILITY_PERCENT
        return LoadPlan(
            concurrency=concurrency,
            rate=rate,
            users=self.num_users or 0,
            prefill_concurrency=prefill_concurrency,
            arrival=self.arrival,
            smoothness=self.smoothness,
            schedule=self.fixed_schedule,
            requests=self.request_count,
            seconds=self.duration,
            grace_seconds=self.grace_period,
            ramp_seconds=self.concurrency_ramp if rate is None else self.rate_ramp,
            stable_percent=stable,
            window_seconds=(self.measurement_interval or 5000.0) / 1000,
            window_requests=self.measurement_requests or 0,
            max_windows=self.max_trials,
            cancel_percent=self.cancel_percent,
            cancel_seconds=self.cancel_seconds,
            seed=self.seed,
        )

    def _warm_up(self, plan: LoadPlan) -> LoadPlan | None:
        if self.warm_up_requests is None and self.warm_up_duration is None:
            return None
        return LoadPlan(
            concurrency=self.warm_up_concurrency or plan.concurrency or 1,
            rate=self.warm_up_rate or (None if self.warm_up_concurrency else plan.rate),
            prefill_concurrency=plan.prefill_concurrency,
            arrival=self.arrival,
            smoothness=self.smoothness,
            requests=self.warm_up_requests,
            seconds=self.warm_up_duration,
            grace_seconds=self.warm_up_grace_period,
            seed=self.seed + 1,
            warm_up=True,
        )
