"""`RoleController`: when a worker gets another role."""

from __future__ import annotations

import msgspec
from fake_worker import INFO

from neso.cluster.roles import Pressure, RoleController, pressure
from neso.cluster.work_queue import WorkerState, WorkQueue
from neso.engine.cluster_config import DECODE, PREFILL, Roles
from neso.engine.core.request import EngineRequest
from neso.generation import SamplingParams

SLOW_PREFILL, SLOW_DECODE, BOTH = Pressure(2.0, 0.1), Pressure(0.1, 2.0), Pressure(2.0, 2.0)


def worker(roles: Roles) -> WorkerState:
    return WorkerState("w", msgspec.structs.replace(INFO, kv_address="ipc://kv"), roles)


def test_slow_prefills_move_the_least_busy_decode_worker():
    controller = RoleController()
    workers = [worker(PREFILL), worker(DECODE), worker(DECODE)]
    workers[1].num_sequences = 3
    assert controller.decide(workers, SLOW_PREFILL) is None  # wait for a second period
    assert controller.decide(workers, SLOW_PREFILL) == (workers[2], PREFILL)
    workers[2].roles = PREFILL
    # The last decode worker stays one.
    assert [controller.decide(workers, SLOW_PREFILL) for _ in range(3)] == [None] * 3


def test_slow_decodes_move_a_prefill_worker():
    controller = RoleController()
    workers = [worker(PREFILL), worker(PREFILL), worker(DECODE)]
    assert controller.decide(workers, SLOW_DECODE) is None
    assert controller.decide(workers, SLOW_DECODE) == (workers[0], DECODE)


def test_nothing_changes_if_both_sides_are_slow_or_the_load_alternates():
    controller = RoleController()
    workers = [worker(PREFILL), worker(PREFILL), worker(DECODE), worker(DECODE)]
    for now in (BOTH, BOTH, BOTH, SLOW_PREFILL, SLOW_DECODE, SLOW_PREFILL, Pressure(0.9, 0.9), SLOW_DECODE):
        assert controller.decide(workers, now) is None


def test_a_period_passes_after_a_change():
    controller = RoleController()
    workers = [worker(PREFILL), worker(DECODE), worker(DECODE), worker(DECODE)]
    assert [controller.decide(workers, SLOW_PREFILL) is None for _ in range(4)] == [True, False, True, False]


def test_pressure_is_queue_time_and_time_between_tokens():
    workers = [worker(PREFILL), worker(DECODE)]
    assert pressure(workers, 1000, 1.0, 0.1) == (0.0, 0.0)  # nothing was measured
    workers[0].observe_prefill(0.1, 100)
    workers[0].num_prefill_tokens = 500
    workers[1].itl = 0.05
    assert pressure(workers, 1000, 0.5, 0.1) == (3.0, 0.0)  # nothing generates
    queue = WorkQueue()
    request = EngineRequest(request_id="a", prompt_token_ids=[1], sampling=SamplingParams(), max_tokens=1)
    queue.grant(queue.put(request), workers[1])
    assert pressure(workers, 1000, 0.5, 0.1).decode == 0.5
