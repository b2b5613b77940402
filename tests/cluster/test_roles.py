"""`RoleController` and `DemandMeter`: when a worker gets another role."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from fake_worker import BLOCK, INFO

from neso.cluster.messages import Credits, Frame
from neso.cluster.roles import Demand, DemandMeter, RoleController, Split
from neso.cluster.work_queue import WorkerState, WorkQueue
from neso.engine.client.prefix_estimate import PrefixKeys
from neso.engine.cluster_config import DECODE, MIXED, PREFILL, ClusterConfig, Roles
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.generation import SamplingParams
from neso.generation.output import FinishReason

TARGETS = ClusterConfig(workers=1, ttft_target=1.0, itl_target=0.015)
QUIET = Demand(
    prompt_tokens=100.0,
    output_tokens=100.0,
    prompt_length=100.0,
    backlog=0.0,
    seconds_per_token=0.0001,
    step=0.008,
    per_sequence=0.0001,
)
PROMPTS = replace(QUIET, prompt_tokens=21_000.0, prompt_length=4000.0)  # keeps two workers busy
OUTPUTS = replace(QUIET, output_tokens=9000.0)  # one decode worker is too slow
BOTH = replace(PROMPTS, output_tokens=30_000.0)


def worker(roles: Roles, *, movable: bool = True) -> WorkerState:
    info = msgspec.structs.replace(INFO, kv_address="ipc://kv") if movable else INFO
    return WorkerState("w", info, roles)


def workers(prefill: int, decode: int) -> list[WorkerState]:
    return [*(worker(PREFILL) for _ in range(prefill)), *(worker(DECODE) for _ in range(decode))]


def test_prompts_move_the_least_busy_decode_worker_after_two_periods():
    controller, present = RoleController(TARGETS), workers(1, 3)
    present[1].num_sequences = present[2].num_sequences = 3
    assert controller.decide(present, PROMPTS) is None
    assert controller.decide(present, PROMPTS) == (present[3], PREFILL)


def test_outputs_move_a_prefill_worker():
    controller, present = RoleController(TARGETS), workers(3, 1)
    assert controller.decide(present, OUTPUTS) is None
    assert controller.decide(present, OUTPUTS) == (present[0], DECODE)


def test_controller_arrives_at_the_best_split_and_stays():
    controller, present = RoleController(TARGETS), workers(1, 3)
    for _ in range(20):
        change = controller.decide(present, PROMPTS)
        if change is not None:
            change.worker.roles = change.roles
    assert [one.roles for one in present].count(PREFILL) == 3
    assert controller.decide(present, PROMPTS) is controller.decide(present, PROMPTS) is None


@pytest.mark.parametrize("demand", [QUIET, replace(PROMPTS, seconds_per_token=0.0)])
def test_nothing_changes_within_the_targets_or_before_a_measurement(demand: Demand):
    controller, present = RoleController(TARGETS), workers(1, 3)
    assert [controller.decide(present, demand) for _ in range(4)] == [None] * 4


def test_nothing_changes_if_the_load_alternates_or_gains_little():
    controller, present = RoleController(TARGETS), workers(2, 2)
    assert [controller.decide(present, one) for one in (OUTPUTS, QUIET) * 3] == [None] * 6
    # Two splits that are about as good: no change back and forth.
    even = replace(QUIET, prompt_tokens=11_000.0, prompt_length=4000.0, output_tokens=9000.0)
    changes = [controller.decide(present, even) for _ in range(6)]
    assert changes == [None] * 6


def test_workers_do_both_if_no_split_meets_both_targets():
    """Two workers: one cannot decode all outputs; both can, and the prompts too."""
    targets = ClusterConfig(workers=1, ttft_target=2.0, itl_target=0.03)
    demand = replace(QUIET, output_tokens=12_000.0)
    assert max(demand.pressure(Split(1, 0, 1), targets)) > 1
    assert max(demand.pressure(Split(0, 2, 0), targets)) < 1
    controller, present = RoleController(targets), workers(1, 1)
    for _ in range(8):
        change = controller.decide(present, demand)
        if change is not None:
            change.worker.roles = change.roles
    assert [one.roles for one in present] == [MIXED, MIXED]


def test_decode_workers_compute_the_prompts_that_prefill_workers_cannot():
    long_outputs = replace(PROMPTS, output_tokens=3000.0)  # a prompt delays them little
    split = long_outputs.pressure(Split(1, 0, 3), TARGETS)
    assert max(split) < 1.5
    few_decoders = long_outputs.pressure(Split(1, 0, 1), TARGETS)
    assert max(few_decoders) > 2 * max(split)
    # A prompt takes as long as all tokens of a short output.
    short_outputs = replace(PROMPTS, output_tokens=PROMPTS.prompt_tokens / 100)
    assert short_outputs.pressure(Split(1, 0, 3), TARGETS).itl > 1
    assert max(short_outputs.pressure(Split(3, 0, 1), TARGETS)) < 1


def test_sequences_that_find_no_place_count():
    assert max(replace(OUTPUTS, max_sequences=100).pressure(Split(2, 0, 2), TARGETS)) < 1
    assert max(replace(OUTPUTS, max_sequences=30).pressure(Split(2, 0, 2), TARGETS)) > 5


def test_long_outputs_are_seen_before_they_end():
    queue, one = WorkQueue(clock=lambda: 0.0), worker(DECODE)
    meter = DemandMeter(queue)
    request = EngineRequest(
        request_id="a", prompt_token_ids=[1] * BLOCK, sampling=SamplingParams(), max_tokens=900
    )
    job = queue.put(request, PrefixKeys(request, BLOCK))
    queue.grant(job, one)
    assert meter.measure([one], 1.0).output_tokens == 0
    output = SequenceOutput(request_id="a", index=0, token_ids=[7] * 500)
    job.delivered.take(Frame(1, 0, output))
    queue.totals.arrived += 1
    assert meter.measure([one], 1.0).output_tokens > 250


def test_time_between_tokens_is_measured_without_prompts():
    one = worker(MIXED)
    for number in range(1, 11):
        one.num_generating = number
        one.update(Credits())
        one.observe_tokens(0.008 + 0.001 * number, 1)
        one.num_prefill_tokens = 1000
        one.update(Credits())
        one.observe_tokens(0.3, 1)
        one.num_prefill_tokens = 0
    line = one.decode_speed.line()
    assert line is not None and line == pytest.approx((0.008, 0.001))


def test_time_between_tokens_is_fixed_if_the_number_of_sequences_hardly_differs():
    one = worker(DECODE)
    for _ in range(10):
        one.num_generating = 8
        one.observe_tokens(0.01, 1)
    assert one.decode_speed.line() == pytest.approx((0.01, 0.0))


def test_workers_that_transfer_nothing_keep_their_role():
    controller = RoleController(TARGETS)
    present = [worker(MIXED, movable=False), worker(MIXED, movable=False)]
    assert [controller.decide(present, BOTH) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("demand", [PROMPTS, OUTPUTS, BOTH])
def test_more_workers_of_a_role_make_its_side_faster(demand: Demand):
    pressures = [demand.pressure(Split(prefill, 0, 4), TARGETS).ttft for prefill in (1, 2, 3, 4)]
    assert pressures == sorted(pressures, reverse=True)
    pressures = [demand.pressure(Split(4, 0, decode), TARGETS).itl for decode in (1, 2, 3, 4)]
    assert pressures == sorted(pressures, reverse=True)


def test_demand_is_measured_from_the_queue_and_the_workers():
    now = 0.0
    queue = WorkQueue(clock=lambda: now)
    meter, one = DemandMeter(queue), worker(MIXED)
    for number in range(4):
        request = EngineRequest(
            request_id=str(number), prompt_token_ids=[1] * 2 * BLOCK, sampling=SamplingParams(), max_tokens=9
        )
        job = queue.put(request, PrefixKeys(request, BLOCK))
        queue.grant(job, one)
        for token in range(3):
            now += 0.5
            queue.observe(job, 1)
            reason = FinishReason.LENGTH if token == 2 else None
            output = SequenceOutput(request_id=job.id, index=0, token_ids=[7], finish_reason=reason)
            job.delivered.take(Frame(1, token, output))
        queue.ack(job)
    for _ in range(20):
        demand = meter.measure([one], 2.0)
        queue.totals.arrived += 4
        queue.totals.arrived_tokens += 4 * 2 * BLOCK
    # The first prompt is computed whole, the last token of the others; later periods have no grants.
    assert demand.prompt_tokens == pytest.approx(4 * 2 * BLOCK / 2, rel=0.01)
    assert demand.prompt_length == pytest.approx(2 * BLOCK, rel=0.01)
    assert demand.output_tokens == pytest.approx(4 / 2 * 3, rel=0.01)
    assert demand.seconds_per_token > 0
    assert demand.step + demand.per_sequence == pytest.approx(0.5)
