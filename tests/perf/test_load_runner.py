from __future__ import annotations

import asyncio
import time
from collections import Counter as Tally
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from virtual_time import run_in_virtual_time

from neso.perf.load.arrivals import rate_arrivals
from neso.perf.load.plan import Arrival, LoadPlan
from neso.perf.load.runner import Conversations, LoadRunner, Share
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest

SECOND = 1_000_000_000


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def take(self) -> int:
        self.value += 1
        return self.value - 1


class FakeTarget:
    """Responds after `seconds(start)`; notes the number of requests in flight at each start."""

    def __init__(self, seconds: Callable[[int], float] = lambda _: 0.1) -> None:
        self.seconds = seconds
        self.in_flight: list[int] = []
        self.histories: list[int] = []
        self.first_output_seconds = 0.0
        self.in_prefill = self.max_in_prefill = 0
        self.error_kind = ""
        self._active: set[asyncio.Task[None]] = set()

    async def send(self, request, record, history, cancel_after=None, on_first_output=None) -> None:
        record.start_ns = time.monotonic_ns()
        if on_first_output is not None:
            self.in_prefill += 1
            self.max_in_prefill = max(self.max_in_prefill, self.in_prefill)
            asyncio.get_running_loop().call_later(
                self.first_output_seconds, self._first_output, on_first_output
            )
        wait = self.seconds(record.start_ns)
        task = asyncio.ensure_future(asyncio.sleep(wait if cancel_after is None else min(wait, cancel_after)))
        self._active.add(task)
        self.in_flight.append(len(self._active))
        self.histories.append(len(history))
        try:
            await task
            record.cancelled = cancel_after is not None and cancel_after < wait
        except asyncio.CancelledError:
            record.cancelled = True
        self._active.discard(task)
        record.end_ns = time.monotonic_ns()
        record.arrivals_ns.append(record.end_ns)
        record.error_kind = self.error_kind
        if record.output_text is not None:
            record.output_text = "reply"

    def _first_output(self, on_first_output: Callable[[], None]) -> None:
        self.in_prefill -= 1
        on_first_output()

    def message(self, request):
        return {"role": "user", "content": request.text}

    def cancel_all(self) -> None:
        for task in self._active:
            task.cancel()

    def end_session(self, session: str) -> None: ...

    async def close(self) -> None: ...


class Run:
    """Runs plans in virtual time, with a share for each worker."""

    def __init__(
        self, plan: LoadPlan, *, target=None, workers: int = 1, sessions=None, stop_at=None, **fields
    ) -> None:
        self.records: list[RequestRecord] = []
        self.target = target or FakeTarget()

        async def play() -> None:
            self.start = time.monotonic_ns()
            counter = Counter()
            conversations = Conversations(sessions or [[PerfRequest(str(i))] for i in range(3)])
            runners = [
                LoadRunner(plan, conversations, self.target, self.records.append, counter=counter,
                           share=Share(worker, workers), **fields)
                for worker in range(workers)
            ]  # fmt: skip
            if stop_at is not None:
                asyncio.get_running_loop().call_later(stop_at, lambda: [one.stop() for one in runners])
            await asyncio.gather(*(one.run(self.start) for one in runners))
            self.seconds = (time.monotonic_ns() - self.start) / SECOND

        run_in_virtual_time(play())

    @property
    def starts(self) -> list[float]:
        return [(record.start_ns - self.start) / SECOND for record in self.records]

    @property
    def intended(self) -> list[float]:
        return [(record.intended_ns - self.start) / SECOND for record in self.records]

    @property
    def numbers(self) -> list[int]:
        return sorted(record.number for record in self.records)


async def test_a_load_can_be_stopped_when_requests_fail_without_waiting():
    class Target(FakeTarget):
        async def send(self, request, record, history, cancel_after=None, on_first_output=None) -> None:
            if not records:
                asyncio.get_running_loop().call_soon(runner.stop)
            assert len(records) < 1000, "the event loop did not run"
            record.error_kind = "build"

    records: list[RequestRecord] = []
    conversations = Conversations([[PerfRequest()]])
    runner = LoadRunner(LoadPlan(concurrency=2), conversations, Target(), records.append, counter=Counter())
    await runner.run(time.monotonic_ns())
    assert records


@pytest.mark.parametrize("workers", [1, 3])
def test_a_closed_loop_keeps_its_concurrency_over_all_workers(workers):
    run = Run(LoadPlan(concurrency=4, requests=40), workers=workers)
    assert max(run.target.in_flight) == 4 and run.numbers == list(range(40))
    assert run.seconds == pytest.approx(1.0, abs=0.01)


def test_shares_add_up():
    for total in (1, 5, 8):
        assert sum(Share(worker, 3).of(total) for worker in range(3)) == total


@pytest.mark.parametrize("workers", [1, 3])
def test_a_constant_rate_has_no_drift(workers):
    run = Run(LoadPlan(concurrency=0, rate=50, requests=500), workers=workers)
    assert run.numbers == list(range(500))
    assert sorted(run.intended) == pytest.approx([number / 50 for number in range(500)], abs=1e-6)
    assert max(abs(a - b) for a, b in zip(run.starts, run.intended, strict=True)) < 0.001


@pytest.mark.parametrize(
    ("arrival", "smoothness", "variation"),
    [
        (Arrival.POISSON, 1, 1.0),
        (Arrival.GAMMA, 4, 0.5),
        (Arrival.GAMMA, 0.25, 2.0),
        (Arrival.CONSTANT, 1, 0.0),
    ],
)
def test_intervals_have_the_rate_and_variation_of_their_distribution(arrival, smoothness, variation):
    plan = LoadPlan(concurrency=0, rate=10, arrival=arrival, smoothness=smoothness)
    times = np.array([ns for _, (_, ns) in zip(range(20_000), rate_arrivals(plan), strict=False)]) / SECOND
    intervals = np.diff(times)
    assert intervals.mean() == pytest.approx(0.1, rel=0.05)
    assert intervals.std() / intervals.mean() == pytest.approx(variation, abs=0.08)


def test_a_ramp_reaches_the_rate_at_its_end():
    plan = LoadPlan(concurrency=0, rate=100, ramp_seconds=10)
    times = np.array([ns for _, (_, ns) in zip(range(1500), rate_arrivals(plan), strict=False)]) / SECOND
    assert (times < 5).sum() == pytest.approx(125, abs=3)  # a quarter of the requests of the ramp
    assert (times < 10).sum() == pytest.approx(500, abs=3)
    assert np.diff(times[600:]) == pytest.approx(0.01, abs=1e-6)


def test_a_ramp_of_the_concurrency_starts_slots_one_after_the_other():
    run = Run(LoadPlan(concurrency=4, seconds=8, ramp_seconds=4), target=FakeTarget(lambda _: 10.0))
    assert sorted(run.starts) == pytest.approx([0, 1, 2, 3], abs=0.01)


def test_latency_counts_from_the_intended_start_when_the_server_stalls():
    """A server that stalls delays the requests that wait for a free slot: that is the coordinated omission."""
    target = FakeTarget(lambda start: 1.0 if start < run_start[0] + SECOND // 2 else 0.01)
    run_start = [0]

    class Late(FakeTarget):
        async def send(self, *arguments) -> None:
            run_start[0] = run_start[0] or time.monotonic_ns()
            await target.send(*arguments)

    run = Run(LoadPlan(concurrency=1, rate=10, requests=20), target=Late())
    waits = [start - intended for start, intended in zip(run.starts, run.intended, strict=True)]
    assert max(waits) == pytest.approx(0.9, abs=0.02) and waits[-1] < 0.01


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_rate_with_a_limit_never_exceeds_it(workers):
    run = Run(LoadPlan(concurrency=2, rate=1000, requests=20), workers=workers)
    assert max(run.target.in_flight) == 2 and run.numbers == list(range(20))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("rate", [None, 1000])
def test_requests_wait_for_a_place_in_the_prefill_phase(workers, rate):
    target = FakeTarget(lambda _: 0.5)
    target.first_output_seconds = 0.1
    plan = LoadPlan(concurrency=20, rate=rate, prefill_concurrency=2, requests=40)
    run = Run(plan, target=target, workers=workers)
    assert target.max_in_prefill == 2 and run.numbers == list(range(40))
    assert 10 <= max(target.in_flight) <= 12  # two new ones every 0.1 s
    assert run.seconds == pytest.approx(20 * 0.1 + 0.4, abs=0.05)
    waits = [start - intended for start, intended in zip(run.starts, run.intended, strict=True)]
    assert (max(waits) > 1) == (rate is not None)  # a closed loop intends to wait


def test_a_failed_request_releases_its_place_in_the_prefill_phase():
    target = FakeTarget(lambda _: 0.1)
    target.first_output_seconds, target.error_kind = 100, "timeout"
    assert len(Run(LoadPlan(concurrency=2, prefill_concurrency=1, requests=10), target=target).records) == 10


@pytest.mark.parametrize("plan", [LoadPlan(requests=5), LoadPlan(concurrency=0, rate=10, requests=5)])
def test_a_defect_of_an_endpoint_ends_the_load(plan):
    class Target(FakeTarget):
        async def send(self, *arguments) -> None:
            raise AttributeError("defect")

    with pytest.raises(AttributeError, match="defect"):
        Run(plan, target=Target())


def turns_of(number: int, turns: int, delay_ms: float = 0) -> list[PerfRequest]:
    return [PerfRequest(session=f"s{number}", turn=turn, delay_ms=delay_ms) for turn in range(turns)]


@pytest.mark.parametrize("workers", [1, 2])
def test_users_send_evenly_and_one_turn_in_each_of_their_gaps(workers):
    plan = LoadPlan(concurrency=0, rate=10, users=5, requests=100)
    run = Run(plan, sessions=[turns_of(0, 4, 5000), turns_of(1, 3)], workers=workers)
    assert run.numbers == list(range(100))
    assert sorted(run.starts) == pytest.approx([number / 10 for number in range(100)], abs=0.01)
    sessions: dict[str, list[RequestRecord]] = {}
    for record in sorted(run.records, key=lambda record: record.number):
        sessions.setdefault(record.session, []).append(record)
    for records in sessions.values():
        assert [record.turn for record in records] == list(range(len(records)))
        assert all(b.start_ns - a.start_ns == pytest.approx(SECOND / 2, abs=1e7)
                   for a, b in pairwise(records))  # fmt: skip
    # The first sessions of the users are of all lengths, later ones are complete.
    lengths = [len(records) for records in sessions.values()]
    assert {1, 2, 3} <= set(lengths[:5]) and set(lengths[5:-5]) == {3, 4}


def test_a_user_waits_for_the_last_response():
    run = Run(LoadPlan(concurrency=0, rate=10, users=2, requests=20), sessions=[turns_of(0, 20)],
              target=FakeTarget(lambda _: 0.5))  # fmt: skip
    by_user = [[record for record in run.records if record.number % 2 == user] for user in (0, 1)]
    for records in by_user:
        assert all(b.start_ns >= a.end_ns for a, b in pairwise(records))
        assert all(record.intended_ns == pytest.approx(record.start_ns, abs=1e6) for record in records)


def test_turns_tell_their_session_and_its_end():
    sent: list[tuple[str, bool]] = []

    class Target(FakeTarget):
        async def send(self, request, record, *rest) -> None:
            sent.append((request.session, request.ends_session))
            await super().send(request, record, *rest)

    Run(LoadPlan(requests=7), sessions=[turns_of(0, 3), turns_of(1, 2)], target=Target())
    assert sent == [("s0#0", False), ("s0#0", False), ("s0#0", True), ("s1#1", False), ("s1#1", True),
                    ("s0#2", False), ("s0#2", True)]  # fmt: skip


def test_the_duration_ends_the_load_and_the_grace_period_cancels():
    run = Run(LoadPlan(concurrency=2, seconds=1, grace_seconds=0.5), target=FakeTarget(lambda _: 0.7))
    assert run.seconds == pytest.approx(1.4, abs=0.01) and not any(record.cancelled for record in run.records)
    run = Run(LoadPlan(concurrency=2, seconds=1, grace_seconds=0.5), target=FakeTarget(lambda _: 10))
    assert run.seconds == pytest.approx(1.5, abs=0.01) and all(record.cancelled for record in run.records)


def test_without_grace_period_requests_in_flight_are_completed():
    run = Run(LoadPlan(concurrency=2, seconds=1), target=FakeTarget(lambda _: 10))
    assert run.seconds == pytest.approx(10, abs=0.01) and not any(record.cancelled for record in run.records)


@pytest.mark.parametrize("plan", [LoadPlan(concurrency=3), LoadPlan(concurrency=2, rate=100)])
def test_stop_cancels_at_once(plan):
    run = Run(plan, target=FakeTarget(lambda _: 100), stop_at=0.3)
    assert run.seconds == pytest.approx(0.3, abs=0.01) and all(record.cancelled for record in run.records)


def test_a_schedule_starts_requests_at_their_timestamps():
    sessions = [[PerfRequest(str(i), timestamp_ms=ms)] for i, ms in enumerate((1500, 1000, 4000))]
    run = Run(LoadPlan(concurrency=0, schedule=True), sessions=sessions, workers=2)
    assert sorted(run.starts) == pytest.approx([0, 0.5, 3.0], abs=0.01) and run.numbers == [0, 1, 2]


def test_turns_wait_for_the_response_and_their_delay():
    session = [PerfRequest("a", session="s", turn=0), PerfRequest("b", session="s", turn=1, delay_ms=400)]
    run = Run(LoadPlan(concurrency=1, sessions=1), sessions=[session])
    assert run.starts == pytest.approx([0, 0.5], abs=0.01) and run.target.histories == [0, 2]
    assert [record.turn for record in run.records] == [0, 1] and run.records[1].output_text is None


def test_the_number_of_requests_is_exact_with_sessions():
    sessions = [[PerfRequest(session="s", turn=i) for i in range(3)], [PerfRequest()]]
    run = Run(LoadPlan(concurrency=2, requests=10), sessions=sessions, workers=2)
    assert run.numbers == list(range(10))
    assert [record.index for record in sorted(run.records, key=lambda r: r.number)] == [0, 1, 2, 3] * 2 + [
        0,
        1,
    ]


def test_a_failed_turn_ends_its_session():
    target = FakeTarget()
    target.error_kind = "timeout"
    session = [PerfRequest(session="s", turn=i) for i in range(3)]
    assert len(Run(LoadPlan(concurrency=1, sessions=2), sessions=[session], target=target).records) == 2


def test_models_are_used_in_turn_or_at_random():
    run = Run(LoadPlan(requests=9), models=("a", "b", "c"))
    assert [record.model for record in run.records] == ["a", "b", "c"] * 3
    run = Run(LoadPlan(concurrency=10, requests=900), models=("a", "b", "c"), random_models=True)
    counts = [sum(record.model == name for record in run.records) for name in "abc"]
    assert min(counts) > 250 and [record.model for record in run.records[:9]] != ["a", "b", "c"] * 3


def test_adapters_are_used_in_turn_or_at_random():
    run = Run(LoadPlan(requests=6), adapters=("a", "b"))
    assert [record.adapter for record in run.records] == ["a", "b"] * 3
    names = {"models": ("x", "y"), "adapters": ("a", "b")}
    run = Run(LoadPlan(concurrency=10, requests=1000), random_models=True, **names)
    counts = Tally(f"{record.model}{record.adapter}" for record in run.records)
    assert set(counts) == {"xa", "xb", "ya", "yb"} and min(counts.values()) > 190


def test_a_share_of_the_requests_is_cancelled():
    run = Run(LoadPlan(concurrency=10, requests=2000, cancel_percent=25, cancel_seconds=0.02))
    assert sum(record.cancelled for record in run.records) == pytest.approx(500, abs=60)
