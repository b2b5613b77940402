"""Beam groups in any schedule: results of a textbook search, no lost blocks, aborts in every state."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fake_beams import VOCAB, CrossingRunner, best_sequences, logits_after, make_beam_core
from fake_engine import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from neso.engine.addons.registry import standard_addons
from neso.engine.core.attention_window import AttentionWindow
from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.loop.engine_core import EngineCore
from neso.generation import FinishReason

prompts = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=18), min_size=1, max_size=5)


@settings(max_examples=120, deadline=None)
@given(
    prompts=prompts,
    width=st.integers(2, 5),
    max_tokens=st.integers(1, 9),
    num_ends=st.sampled_from([0, 1, 4]),
    early=st.booleans(),
    spare=st.integers(0, 20),
    block_size=st.sampled_from([1, 4]),
    chunk=st.sampled_from([1, 3, 32]),
    caching=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_schedule_equals_the_reference_search(
    prompts, width, max_tokens, num_ends, early, spare, block_size, chunk, caching, seed
):
    """The cache holds the blocks of one search and a few more, so groups are preempted and resumed."""
    longest = 18 + max_tokens
    needed = longest if block_size == 1 else -(-longest // block_size)
    core = make_beam_core(
        needed * width + spare, block_size=block_size, max_prefill_chunk=chunk, enable_prefix_caching=caching
    )
    rng, ends = random.Random(seed), tuple(range(num_ends))
    options = {"beam_width": width, "n": width, "early_stopping": early, "end_token_ids": ends}
    late = [make_request(str(i), p, max_tokens, **options) for i, p in enumerate(prompts)]
    late += [make_request(f"greedy {i}", p, max_tokens) for i, p in enumerate(prompts)]
    rng.shuffle(late)
    found: dict[str, list[tuple[list[int], float]]] = {}
    while late or core.has_work:
        while late and rng.random() < 0.5:
            assert core.add(late.pop()) == []
        for output in core.step():
            assert not output.error
            if not output.request_id.startswith("greedy"):
                assert output.finish_reason is not None, "beams come at the end, all tokens at once"
                found.setdefault(output.request_id, []).append((output.token_ids, output.cumulative_logprob))
        core.check_integrity()
    assert core.scheduler.kv.pool.num_used == 0
    for i, prompt in enumerate(prompts):
        expected = best_sequences(prompt, width, max_tokens, ends, early)
        assert [tokens for tokens, _ in found[str(i)]] == [tokens for tokens, _ in expected]
        np.testing.assert_allclose([s for _, s in found[str(i)]], [s for _, s in expected], rtol=1e-4)


@settings(max_examples=80, deadline=None)
@given(prompts=prompts, width=st.integers(2, 4), spare=st.integers(0, 6), seed=st.integers(0, 10_000))
def test_aborts_in_every_state_free_all_blocks(prompts, width, spare, seed):
    """Requests are aborted while waiting, prefilling, running, preempted or catching up; the others get their beams."""
    core = make_beam_core(7 * width + spare, max_prefill_chunk=3)
    rng = random.Random(seed)
    for i, prompt in enumerate(prompts):
        core.add(make_request(str(i), prompt, 9, beam_width=width, n=width))
    doomed = {str(i) for i in range(len(prompts)) if rng.random() < 0.5}
    done: set[str] = set()
    aborted: set[str] = set()
    while core.has_work:
        if doomed - aborted and rng.random() < 0.2:
            victim = rng.choice(sorted(doomed - aborted))
            # One sequence represents its group.
            core.abort(victim, rng.choice([None, 0]))
            aborted.add(victim)
            if rng.random() < 0.5:
                core.abort(victim)
            core.check_integrity()
        for output in core.step():
            assert output.request_id not in aborted - done
            done.add(output.request_id)
        core.check_integrity()
    assert done | aborted == {str(i) for i in range(len(prompts))}
    assert core.scheduler.kv.pool.num_used == 0


def test_preempted_groups_restart_from_the_shared_prefix():
    core = make_beam_core(17, max_prefill_chunk=3, enable_prefix_caching=False)
    for i in range(3):
        core.add(make_request(str(i), [i, 1, 2, 3, 4, 5], 16, beam_width=3, n=3))
    states = set()
    while core.has_work:
        core.step()
        core.check_integrity()
        for sequence in [*core.scheduler.running, *core.scheduler.waiting]:
            assert sequence.group is not None
            states.add((sequence.status.value, len(sequence.group.members), bool(sequence.num_preemptions)))
    assert core.scheduler.num_preemptions > 0
    assert {("waiting", 1, True), ("running", 1, True), ("running", 3, False)} <= states


def test_a_waiting_beam_computes_all_but_its_last_token():
    core = make_beam_core(40, max_prefill_chunk=2)
    core.add(make_request("a", [1, 2, 3], 12, beam_width=2, n=2))
    while not core.scheduler.running or core.scheduler.running[0].num_output_tokens < 8:
        core.step()
    group = core.scheduler.running[0].group
    # As after a preemption of beams with a short common prefix.
    core.scheduler.kv.prefix_cache.clear()
    core.scheduler._preempt(core.scheduler.running[-1], core.scheduler.schedule())
    seen = set()
    while core.has_work:
        core.step()
        core.check_integrity()
        seen |= {member.num_uncomputed_tokens for member in group.members}
    assert {1, 2} <= seen


def test_nan_logits_fail_only_their_group(monkeypatch):
    core = make_beam_core()
    core.add(make_request("bad", [1], 8, beam_width=3))
    core.add(make_request("good", [2], 8, beam_width=3))
    core.step()
    step = core.runner.step

    def fail_in_step(plan):
        logits = step(plan)
        logits[1, 3] = float("nan")
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "step", fail_in_step)
        (bad,) = core.step()
    assert (bad.request_id, bad.finish_reason) == ("bad", FinishReason.ERROR)
    core.check_integrity()
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("good", FinishReason.LENGTH)]


def test_a_failing_step_ends_every_beam_of_a_group(monkeypatch):
    core = make_beam_core()
    core.add(make_request("a", [1], 8, beam_width=3))
    core.step()

    def fail(plan):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "step", fail)
        outputs = core.step()
    assert {o.finish_reason for o in outputs} == {FinishReason.ERROR}
    assert not core.has_work
    core.check_integrity()


def test_fewer_allowed_tokens_than_beams():
    """One token is allowed first, then two: the group has one beam, then two, of its three."""
    core = make_beam_core()
    request = make_request("a", [1], 3, beam_width=3, n=3, allowed_token_ids=(4, 5), no_repeat_ngram_size=1)
    core.add(request)
    outputs = []
    while core.has_work:
        outputs += core.step()
        core.check_integrity()
    assert sorted(o.token_ids for o in outputs if o.token_ids) == []
    core.add(make_request("b", [1], 2, beam_width=3, n=3, allowed_token_ids=(4, 5), no_repeat_ngram_size=1))
    while core.has_work:
        outputs += core.step()
        core.check_integrity()
    found = [o for o in outputs if o.request_id == "b"]
    assert sorted(o.token_ids for o in found) == [[], [4, 5], [5, 4]]
    assert all(o.finish_reason for o in found)


def test_a_group_too_large_for_the_cache_is_rejected():
    core = make_beam_core(num_blocks=10)
    assert core.add(make_request("fits", [1] * 8, 8, beam_width=4)) == []
    (output,) = core.add(make_request("does not", [1] * 8, 12, beam_width=4))
    assert "each of 4 sequences" in output.error
    (output,) = core.add(make_request("wide", [1], 1, beam_width=13))
    assert "at most 12 can run" in output.error


@pytest.mark.parametrize("rate", [0.0, 5.0])
def test_diversity_prefers_candidates_of_later_beams(rate):
    """With a large rate, all candidates of the worst beam rank above those of the other beams."""
    core = make_beam_core()
    core.add(make_request("a", [3], 4, beam_width=3, n=3, beam_search_diversity_rate=rate))
    core.step()
    before = [m.token_ids for m in core.scheduler.running[0].group.members]
    core.step()
    parents = [m.token_ids[:-1] for m in core.scheduler.running[0].group.members]
    if rate:
        assert parents == [before[-1]] * 3
    else:
        assert before[0] in parents


def test_stop_words_end_a_hypothesis():
    core = make_beam_core()
    core.add(make_request("plain", [3], 6, beam_width=2, n=1))
    plain = []
    while core.has_work:
        plain += core.step()
    word = tuple(plain[0].token_ids[2:4])
    core.add(make_request("stops", [3], 6, beam_width=2, n=1, stop_words=(word,), length_penalty=-5.0))
    stops = []
    while core.has_work:
        stops += core.step()
    assert stops[0].token_ids[-2:] == list(word) and stops[0].finish_reason is FinishReason.STOP
    assert max(stops[0].token_ids) < VOCAB


@settings(max_examples=60, deadline=None)
@given(prompts=prompts, width=st.integers(2, 4), spare=st.integers(0, 30), seed=st.integers(0, 10_000))
def test_guaranteed_no_evict_never_preempts(prompts, width, spare, seed):
    """Admission counts the blocks that running beams may still need."""
    core = make_beam_core(7 * width + spare, batch_scheduler_policy="guaranteed_no_evict")
    rng = random.Random(seed)
    late = [make_request(f"beams {i}", p, 9, beam_width=width, n=width) for i, p in enumerate(prompts)]
    late += [make_request(f"greedy {i}", p, 9) for i, p in enumerate(prompts)]
    rng.shuffle(late)
    done = 0
    while late or core.has_work:
        while late and rng.random() < 0.5:
            assert core.add(late.pop()) == []
        done += sum(output.finish_reason is not None and output.index == 0 for output in core.step())
        core.check_integrity()
    assert core.scheduler.num_preemptions == 0
    assert done == 2 * len(prompts)


def test_blocks_outside_the_window_of_beams_are_freed():
    """Beams with sliding-window attention hold only the blocks in the window, at any length."""
    window = AttentionWindow(size=6)
    runner = CrossingRunner(window)
    config = SchedulerConfig(block_size=4, max_prefill_chunk=4, max_num_seqs=8)
    core = EngineCore(runner, config, 3 * 4 + 2, standard_addons(runner))
    assert core.add(make_request("a", [1, 2, 3], 60, beam_width=3, n=3)) == []
    outputs = []
    while core.has_work:
        outputs += core.step()
        core.check_integrity()
    assert [len(output.token_ids) for output in outputs] == [60] * 3
    assert core.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("options", [{"n": 3}, {"beam_width": 3}], ids=["sampled", "beams"])
def test_context_logits_are_output_once_despite_preemption(options):
    core = make_beam_core(17, max_prefill_chunk=5)
    prompt = list(range(11))
    for i in range(3):
        core.add(make_request(str(i), prompt, 12, return_context_logits=True, prompt_logprobs=0, **options))
    rows: dict[str, bytes] = {}
    scored: dict[str, int] = {}
    while core.has_work:
        for output in core.step():
            rows[output.request_id] = rows.get(output.request_id, b"") + output.context_logits
            scored[output.request_id] = scored.get(output.request_id, 0) + len(output.prompt_logprobs)
        core.check_integrity()
    assert core.scheduler.num_preemptions > 0
    expected = np.stack([logits_after(prompt[: i + 1]) for i in range(11)])
    for i in range(3):
        np.testing.assert_array_equal(np.frombuffer(rows[str(i)], np.float32).reshape(11, VOCAB), expected)
        assert scored[str(i)] == 10
