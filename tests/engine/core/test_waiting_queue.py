"""The queue: nobody starves, nobody waits for longer than allowed, no more wait than may."""

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
def test_everything_ends_under_a_flood_of_high_priority(levels, num_blocks, ageing, policy):
    """With a place for one and an urgent request in every step, all of the others have their turn."""
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


def test_strict_priorities_do_starve():
    """The same flood without ageing: what the test above would find."""
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


def test_a_level_is_worth_so_many_seconds():
    core, clock = core_with_clock(max_num_seqs=1, priority_ageing_seconds=10)
    for name, priority, wait in (("a", 0, 0), ("low", 1, 9), ("before", 0, 2), ("behind", 0, 0)):
        core.add(make_request(name, [1], max_tokens=1, priority=priority))
        clock.now += wait
    finished = []
    while core.has_work:
        finished += [output.request_id for output in core.step() if output.finish_reason]
    assert finished == ["a", "before", "low", "behind"]


def test_who_waits_too_long_is_refused_and_who_runs_is_not():
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


def test_who_was_preempted_is_not_late():
    core, clock = core_with_clock(num_blocks=12)
    for i in range(6):
        core.add(make_request(str(i), [i] * 8, max_tokens=20, queue_timeout_ms=1000))
    while not core.scheduler.num_preemptions:
        core.step()
    waiting = {s.request.request_id for s in core.scheduler.waiting if s.num_preemptions}
    clock.now += 10
    refused = {output.request_id for output in core.step() if output.refused}
    assert waiting and not waiting & refused


def test_a_full_queue_refuses():
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
def test_equal_priorities_go_by_arrival(seconds):
    core, _ = core_with_clock(max_num_seqs=1, priority_ageing_seconds=seconds)
    for name in "abc":
        core.add(make_request(name, [1], max_tokens=1))
    finished = []
    while core.has_work:
        finished += [output.request_id for output in core.step() if output.finish_reason]
    assert finished == ["a", "b", "c"]


def test_what_began_or_ended_is_not_kept_until_its_deadline():
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
