"""Waiting queue: ageing, queue timeouts and the queue limit."""

from __future__ import annotations

import gc

import pytest
from fake_engine import expected_tokens, make_core, make_request, run
from hypothesis import given, settings
from hypothesis import strategies as st

from neso.engine.core.admission import WaitingQueue
from neso.engine.core.sequence import Sequence
from neso.generation import FinishReason


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def core_with_clock(**options):
    core, clock = make_core(**options), Clock()
    config = core.scheduler.config
    core.scheduler.waiting = WaitingQueue(config.max_queue_size, config.priority_ageing_seconds, clock)
    return core, clock


@settings(max_examples=40, deadline=None)
@given(
    levels=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    num_blocks=st.integers(6, 16),
    ageing=st.sampled_from([1.0, 5.0]),
    policy=st.sampled_from(["max_utilization", "guaranteed_no_evict"]),
)
def test_ageing_prevents_starvation(levels, num_blocks, ageing, policy):
    """One slot and an urgent request in every step: all other requests finish too."""
    core, clock = core_with_clock(
        num_blocks=num_blocks,
        max_num_seqs=2,
        priority_ageing_seconds=ageing,
        batch_scheduler_policy=policy,
    )
    for i, level in enumerate(levels):
        core.add(make_request(f"patient-{i}", [i], max_tokens=6, priority=level))
    left = {f"patient-{i}" for i in range(len(levels))}
    for step in range(600):
        clock.now += 0.5
        core.add(make_request(f"urgent-{step}", [9, 9, 9], max_tokens=3, priority=-3))
        left -= {output.request_id for output in core.step() if output.finish_reason}
        core.check_integrity()
        if not left:
            return
    raise AssertionError(f"{left} never ended")


def test_strict_priorities_starve():
    """The same load without ageing, to prove that the test above can fail."""
    core, clock = core_with_clock(max_num_seqs=2, priority_ageing_seconds=0)
    core.add(make_request("urgent", [1], max_tokens=3, priority=-3))
    core.step()
    core.add(make_request("patient", [1], max_tokens=1, priority=0))
    finished = set()
    for step in range(200):
        clock.now += 0.5
        for i in range(2):
            core.add(make_request(f"urgent-{step}-{i}", [9, 9, 9], max_tokens=3, priority=-3))
        finished |= {output.request_id for output in core.step() if output.finish_reason}
    assert "patient" not in finished


def test_a_priority_level_equals_the_ageing_seconds():
    core, clock = core_with_clock(max_num_seqs=1, priority_ageing_seconds=10)
    for name, priority, wait in (("a", 0, 0), ("low", 1, 9), ("before", 0, 2), ("behind", 0, 0)):
        core.add(make_request(name, [1], max_tokens=1, priority=priority))
        clock.now += wait
    finished = []
    while core.has_work:
        finished += [output.request_id for output in core.step() if output.finish_reason]
    assert finished == ["a", "before", "low", "behind"]


def test_queue_timeout_refuses_only_waiting_requests():
    core, clock = core_with_clock(max_num_seqs=1)
    core.add(make_request("runs", [1], max_tokens=8, queue_timeout_ms=50))
    core.add(make_request("waits", [2], max_tokens=8, queue_timeout_ms=50))
    core.add(make_request("patient", [3], max_tokens=8))
    core.step()
    clock.now += 0.2
    refused = [output for output in core.step() if output.finish_reason is FinishReason.ERROR]
    assert [(output.request_id, output.refused) for output in refused] == [("waits", True)]
    assert "queue_timeout_ms, 50 ms" in refused[0].error
    core.check_integrity()
    tokens = run(core)
    assert tokens["patient", 0] == expected_tokens([3], 8)
    assert "runs" in {name for name, _ in tokens}


def test_queue_timeout_ignores_preempted_requests():
    core, clock = core_with_clock(num_blocks=12)
    for i in range(6):
        core.add(make_request(str(i), [i] * 8, max_tokens=20, queue_timeout_ms=1000))
    while not core.scheduler.num_preemptions:
        core.step()
    waiting = {s.request.request_id for s in core.scheduler.waiting if s.num_preemptions}
    clock.now += 10
    refused = {output.request_id for output in core.step() if output.refused}
    assert waiting and not waiting & refused


def test_a_full_queue_refuses_requests():
    core = make_core(max_num_seqs=1, max_queue_size=2)
    core.add(make_request("a", [1]))
    core.step()
    for name in "bc":
        assert core.add(make_request(name, [1])) == []
    (output,) = core.add(make_request("d", [1]))
    assert output.refused and "max_queue_size is 2" in output.error
    assert {name for name, _ in run(core)} == {"a", "b", "c"}
    assert core.add(make_request("d", [1])) == []


@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_equal_priorities_run_in_arrival_order(seconds):
    core, _ = core_with_clock(max_num_seqs=1, priority_ageing_seconds=seconds)
    for name in "abc":
        core.add(make_request(name, [1], max_tokens=1))
    finished = []
    while core.has_work:
        finished += [output.request_id for output in core.step() if output.finish_reason]
    assert finished == ["a", "b", "c"]


def test_finished_requests_are_released_before_their_deadline():
    core = make_core(max_queue_size=300)
    for i in range(300):
        core.add(make_request(f"limited-{i}", [i % 7], max_tokens=2, queue_timeout_ms=3_600_000))
        if i % 2:
            core.abort(f"limited-{i}")
    run(core)
    gc.collect()
    sequences = [found for found in gc.get_objects() if type(found) is Sequence]
    assert not [s for s in sequences if s.request.request_id.startswith("limited-")]
    assert len(core.scheduler.waiting._deadlines) < 100
