"""Scheduling policies: admission of waiting requests, and blocks reserved for running ones."""

from __future__ import annotations

import pytest
from fake_engine import expected_tokens, make_core, make_request, run

from neso.engine.core.attention_window import AttentionWindow
from neso.engine.core.scheduler_config import SchedulerConfig


def fill(core, count=6, prompt=8, max_tokens=20):
    for i in range(count):
        core.add(make_request(str(i), [i] * prompt, max_tokens=max_tokens))


@pytest.mark.parametrize("overlap", [False, True])
def test_guaranteed_no_evict_never_preempts(overlap):
    preemptions = {}
    for policy in ("max_utilization", "guaranteed_no_evict"):
        core = make_core(16, overlap, batch_scheduler_policy=policy)
        fill(core)
        tokens = run(core)
        assert tokens == {(str(i), 0): expected_tokens([i] * 8, 20) for i in range(6)}
        preemptions[policy] = core.scheduler.num_preemptions
    assert preemptions["guaranteed_no_evict"] == 0 < preemptions["max_utilization"]


def test_guaranteed_no_evict_counts_reserved_blocks():
    """28 tokens in blocks of 4 need 7 blocks: two sequences fit into 15, although a third prompt would fit."""
    core = make_core(15, batch_scheduler_policy="guaranteed_no_evict")
    fill(core)
    core.step()
    assert len(core.scheduler.running) == 2


def test_shared_prefixes_are_reserved_once():
    """Six sequences whose 12 common tokens are cached need 3 + 6 * 2 blocks, not 6 * 5."""
    core = make_core(15, batch_scheduler_policy="guaranteed_no_evict")
    core.add(make_request("first", list(range(12)), max_tokens=1))
    run(core)
    for i in range(6):
        core.add(make_request(str(i), [*range(12), 50 + i], max_tokens=7))
    core.step()
    assert len(core.scheduler.running) == 6
    run(core)
    assert core.scheduler.num_preemptions == 0


def test_n_sequences_run_alone_if_they_do_not_fit_together():
    core = make_core(9, batch_scheduler_policy="guaranteed_no_evict")
    core.add(make_request("many", list(range(9)), max_tokens=20, n=4))
    core.add(make_request("other", [1, 2], max_tokens=4))
    tokens = run(core)
    assert len(tokens) == 5
    assert all(tokens["many", i] == expected_tokens(list(range(9)), 20) for i in range(4))


def test_a_static_batch_starts_when_the_previous_one_ends():
    core = make_core(64, gpt_model_type="V1", max_num_seqs=2)
    for name, length in (("a", 3), ("b", 6), ("c", 2), ("d", 2)):
        core.add(make_request(name, [1, 2], max_tokens=length))
    together = []
    while core.has_work:
        outputs = core.step()
        together.append("".join(output.request_id for output in outputs))
    assert together == ["ab", "ab", "ab", "b", "b", "b", "cd", "cd"]


def test_stats_of_a_static_batch():
    """They are those of the last batch, also when it has ended."""
    core = make_core(64, gpt_model_type="V1", max_num_seqs=3)
    for name, prompt, length in (("a", 2, 3), ("b", 4, 6), ("c", 1, 2), ("d", 5, 4)):
        core.add(make_request(name, [1] * prompt, max_tokens=length))
    core.step()
    first = (7, 11, 3 * 6 - 11)
    assert core.stats().static_batch == first
    seen = [core.stats().static_batch]
    while core.has_work:
        core.step()
        seen.append(core.stats().static_batch)
    assert list(dict.fromkeys(seen)) == [first, (5, 4, 0)]
    assert make_core(64).stats().static_batch == (0, 0, 0)


def test_a_static_batch_is_filled_over_several_steps():
    """Prompts beyond the step's token budget still belong to the batch; later requests do not."""
    core = make_core(
        64, gpt_model_type="V1", max_num_batched_tokens=16, max_prefill_chunk=16, max_decode_stretch=0
    )
    for name in "abc":
        core.add(make_request(name, [ord(name)] * 12, max_tokens=8))
    core.step()
    core.add(make_request("late", [1], max_tokens=1))
    finished = []
    while core.has_work:
        finished += [output.request_id for output in core.step() if output.finish_reason]
    assert sorted(finished[:3]) == ["a", "b", "c"] and finished[3] == "late"


def test_a_window_lets_sequences_outgrow_the_cache():
    """200 tokens pass through 10 blocks of 4, two sequences at a time, without preemption."""
    window = AttentionWindow(6, sinks=2)
    core = make_core(10, window=window, batch_scheduler_policy="guaranteed_no_evict", max_prefill_chunk=4)
    for i in range(3):
        assert core.add(make_request(str(i), [i] * 5, max_tokens=200)) == []
    core.step()
    assert len(core.scheduler.running) == 2
    tokens = run(core)
    assert tokens == {(str(i), 0): expected_tokens([i] * 5, 200, window) for i in range(3)}
    assert core.scheduler.num_preemptions == 0


def test_blocks_outside_the_window_are_freed_at_once():
    core = make_core(64, window=AttentionWindow(8), enable_prefix_caching=False)
    core.add(make_request("a", list(range(30)), max_tokens=30))
    held = []
    while core.has_work:
        core.step()
        held.append(core.scheduler.kv.pool.num_used)
    assert max(held[1:-1]) <= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_queue_size": 0}, "max_queue_size"),
        ({"priority_ageing_seconds": -1}, "priority_ageing_seconds"),
    ],
)
def test_invalid_limits_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**options)
