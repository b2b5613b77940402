from __future__ import annotations

from neso.perf.load.plan import LoadPlan
from neso.perf.load.stability import StabilityCheck
from neso.perf.records import Records, RequestRecord

SECOND = 1_000_000_000


def window(check: StabilityCheck, number: int, requests: int, latency: float) -> bool:
    """Add a window of one second with so many requests; return whether the load can end."""
    ends = [int((number + (i + 0.5) / requests) * SECOND) for i in range(requests)]
    check.add(Records.of(RequestRecord(intended_ns=end - int(latency * SECOND), end_ns=end) for end in ends))
    return check.advance((number + 1) * SECOND)


def plan(**fields) -> LoadPlan:
    return LoadPlan(stable_percent=10, window_seconds=1.0, **fields)


def test_three_windows_that_agree_end_the_load():
    check = StabilityCheck(plan(), 0)
    assert [window(check, i, n, 0.1) for i, n in enumerate((10, 50, 100, 104, 98))] == [False] * 4 + [True]
    assert check.is_stable and check.measured_from_ns == 2 * SECOND


def test_a_latency_that_changes_is_not_stable():
    check = StabilityCheck(plan(), 0)
    assert not any(window(check, i, 100, latency) for i, latency in enumerate((0.1, 0.2, 0.4, 0.8)))


def test_the_number_of_windows_is_limited():
    check = StabilityCheck(plan(max_windows=3), 0)
    assert [window(check, i, n, 0.1) for i, n in enumerate((10, 50, 100))] == [False, False, True]
    assert not check.is_stable


def test_a_window_can_be_a_number_of_requests():
    check = StabilityCheck(plan(window_requests=20), 0)
    assert [window(check, i, 10, 0.1) for i in range(6)] == [False] * 5 + [True]
    assert check.is_stable and len(check.windows) == 3


def test_a_server_without_responses_is_never_stable():
    check = StabilityCheck(plan(), 0)
    assert not check.advance(3 * SECOND) and not check.is_stable
