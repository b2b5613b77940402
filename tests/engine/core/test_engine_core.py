"""The engine core on a fake model: in any schedule each sequence gets its tokens, and the KV-cache accounting holds."""

from __future__ import annotations

import random
from array import array
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from fake_engine import expected_tokens, make_core, make_request, next_token, run
from hypothesis import given, settings
from hypothesis import strategies as st

from neso.engine.addons.registry import PLAN_PARTS
from neso.engine.core.prefix_cache import PrefixCache
from neso.engine.core.request import SequenceOutput
from neso.engine.core.sequence import NO_BLOCK
from neso.engine.core.step import padded_block_tables
from neso.engine.core.step_plan import PlanPart, StepPlan
from neso.generation import FinishReason

prompts = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=24), min_size=1, max_size=10)


@settings(max_examples=150, deadline=None)
@given(
    prompts=prompts,
    max_tokens=st.integers(1, 12),
    num_blocks=st.integers(9, 40),
    chunk=st.sampled_from([1, 3, 32]),
    caching=st.booleans(),
    overlap=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_schedule_gives_the_same_tokens(prompts, max_tokens, num_blocks, chunk, caching, overlap, seed):
    """Prefix hits, chunks, preemption, late arrivals and overlapping steps change no token; all blocks are freed."""
    core = make_core(num_blocks, overlap, max_prefill_chunk=chunk, enable_prefix_caching=caching)
    rng = random.Random(seed)
    tokens: dict[str, list[int]] = {}
    # A logit bias of 0 changes no token, but the tokens of its steps are sampled after the previous step has ended.
    options = [{"logit_bias": {0: 0.0}} if rng.random() < 0.2 else {} for _ in prompts]
    late = [make_request(str(i), p, max_tokens, **options[i]) for i, p in enumerate(prompts)]
    while late or core.has_work:
        while late and rng.random() < 0.5:
            assert core.add(late.pop()) == []
        for output in core.step():
            assert not output.error
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        core.check_integrity()
    assert tokens == {str(i): expected_tokens(p, max_tokens) for i, p in enumerate(prompts)}
    assert core.scheduler.kv.pool.num_used == 0


@settings(max_examples=100, deadline=None)
@given(prompts=prompts, num_blocks=st.integers(9, 30), overlap=st.booleans(), seed=st.integers(0, 10_000))
def test_aborts_at_any_time_free_all_blocks(prompts, num_blocks, overlap, seed):
    """Aborted requests, forked or not, free their blocks; the others get every token."""
    core = make_core(num_blocks, overlap)
    rng = random.Random(seed)
    requests = [make_request(str(i), p, 8, n=rng.choice([1, 1, 3])) for i, p in enumerate(prompts)]
    for request in requests:
        core.add(request)
    doomed = {r.request_id for r in requests if rng.random() < 0.5}
    aborted: set[str] = set()
    tokens: dict[tuple[str, int], list[int]] = {}
    while core.has_work:
        if doomed - aborted and rng.random() < 0.4:
            victim = rng.choice(sorted(doomed - aborted))
            core.abort(victim)
            aborted.add(victim)
            core.check_integrity()
        for output in core.step():
            assert output.request_id not in aborted
            tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        core.check_integrity()
    for request in requests:
        if request.request_id not in aborted:
            for index in range(request.sampling.n):
                expected = expected_tokens(request.prompt_token_ids, 8)
                assert tokens[request.request_id, index] == expected
    assert core.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_changes_no_token(overlap):
    core = make_core(12, overlap)
    for i in range(6):
        core.add(make_request(str(i), [i] * 8, max_tokens=20))
    tokens = run(core)
    assert core.scheduler.num_preemptions > 0
    assert tokens == {(str(i), 0): expected_tokens([i] * 8, 20) for i in range(6)}


def test_prefix_is_computed_once():
    core = make_core()
    prompt = list(range(17))
    core.add(make_request("first", prompt))
    run(core)
    before = core.stats()
    core.add(make_request("second", prompt))
    core.step()
    assert core.last_plan is not None
    assert core.last_plan.num_computed.tolist() == [16], "four full blocks were found"
    assert core.stats().prefix_hit_tokens - before.prefix_hit_tokens == 16


def test_fully_cached_prompt_computes_one_token():
    core = make_core()
    prompt = list(range(16))
    for name in ("first", "second"):
        core.add(make_request(name, prompt))
        tokens = run(core)
        assert tokens[name, 0] == expected_tokens(prompt, 8)


def test_cache_identities_do_not_share_blocks():
    core = make_core()
    prompt = list(range(17))
    core.add(make_request("first", prompt, cache_identity=("tenant-a",)))
    run(core)
    core.add(make_request("second", prompt, cache_identity=("tenant-b",)))
    core.step()
    assert core.last_plan is not None and core.last_plan.num_computed.tolist() == [0]


def test_forks_share_the_prompt_and_copy_on_write():
    core = make_core(num_blocks=64)
    prompt = list(range(10))
    core.add(make_request("n", prompt, max_tokens=6, n=4))
    core.step()
    assert core.scheduler.kv.pool.num_used == 3, "four sequences on the blocks of one prompt"
    core.step()
    assert core.last_plan is not None
    assert len(core.last_plan.block_copies) == 3, "the last of four writes in place"
    rest = run(core)
    assert {index for _, index in rest} == {0, 1, 2, 3}


def test_long_prompt_does_not_stall_decoding():
    core = make_core(num_blocks=128, max_num_batched_tokens=16, max_prefill_chunk=16)
    core.add(make_request("short", [1, 2], max_tokens=30))
    core.step()
    core.add(make_request("long", [3] * 200, max_tokens=2))
    for _ in range(10):
        outputs = core.step()
        assert [o.request_id for o in outputs] == ["short"], "a token for the short one in every step"


def test_high_priority_runs_first_and_is_preempted_last():
    core = make_core(num_blocks=64, max_num_seqs=1, max_num_batched_tokens=32)
    core.add(make_request("a", [1], max_tokens=2))
    core.add(make_request("b", [2], max_tokens=2))
    core.add(make_request("urgent", [3], max_tokens=2, priority=-1))
    order = []
    while core.has_work:
        order += [o.request_id for o in core.step() if o.finish_reason]
    assert order == ["urgent", "a", "b"]


def test_end_token_and_min_tokens():
    prompt = [4, 5]
    end = expected_tokens(prompt, 3)[2]
    core = make_core()
    core.add(make_request("stops", prompt, max_tokens=20, end_token_ids=(end,)))
    last = None
    while core.has_work:
        (last,) = core.step()
    assert last is not None
    assert (last.finish_reason, last.end_token_id) == (FinishReason.STOP, end)
    core.add(make_request("goes on", prompt, max_tokens=5, min_tokens=5, end_token_ids=(end,)))
    assert end not in run(core)["goes on", 0][:5]


@pytest.mark.parametrize(
    ("request_id", "options", "message"),
    [
        ("big", {"prompt": [1] * 300, "max_tokens": 8, "prompt_logprobs": 0}, "308 tokens of KV cache"),
        ("many", {"prompt": [1], "n": 9}, "at most 8 can run"),
        ("twice", {"prompt": [1]}, "in use"),
    ],
)
def test_impossible_requests_are_rejected(request_id, options, message):
    core = make_core(num_blocks=64)
    core.add(make_request("twice", [1]))
    (output,) = core.add(make_request(request_id, **options))
    assert output.finish_reason is FinishReason.ERROR
    assert message in output.error
    assert core.scheduler.num_sync_only == 0
    assert run(core) == {("twice", 0): expected_tokens([1], 8)}


def test_failing_step_fails_only_its_requests(monkeypatch):
    core = make_core()
    core.add(make_request("doomed", [1, 2, 3]))

    def fail(plan):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "step", fail)
        (output,) = core.step()
    assert output.finish_reason is FinishReason.ERROR and "no room" in output.error
    core.check_integrity()
    assert not core.has_work
    core.add(make_request("next", [1, 2, 3]))
    assert run(core)["next", 0] == expected_tokens([1, 2, 3], 8)


def test_nan_logits_fail_one_request(monkeypatch):
    core = make_core()
    core.add(make_request("bad", [1]))
    core.add(make_request("good", [2]))
    step = core.runner.step

    def fail_in_step(plan):
        logits = step(plan)
        logits[0, 3] = float("nan")
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "step", fail_in_step)
        bad, good = core.step()
    assert bad.finish_reason is FinishReason.ERROR and "NaN logits" in bad.error
    assert good.token_ids == [next_token([2])]
    assert run(core)["good", 0] == expected_tokens([2], 8)[1:]


def test_prompt_logprobs_are_output_once_across_chunks_and_preemption():
    core = make_core(num_blocks=10, max_prefill_chunk=3)
    prompt = list(range(20))
    core.add(make_request("other", [9] * 8, max_tokens=16, priority=-1))
    core.add(make_request("scored", prompt, max_tokens=4, prompt_logprobs=1))
    entries = []
    while core.has_work:
        for output in core.step():
            if output.request_id == "scored":
                entries += output.prompt_logprobs
    assert [entry.token_id for entry in entries] == prompt[1:]


def test_block_tables_are_padded_to_the_longest():
    tables = [array("i", table) for table in ([7, 8], [], [1, NO_BLOCK, 3, 2**31 - 1])]
    expected = [[7, 8, -1, -1], [-1] * 4, [1, NO_BLOCK, 3, 2**31 - 1]]
    padded = padded_block_tables(tables)
    assert padded.dtype == np.int32
    assert padded.tolist() == expected


def test_step_plan_serialization_round_trip(tmp_path):
    core = make_core()
    core.add(make_request("a", [1, 2, 3]))
    core.step()
    plan = core.last_plan
    assert plan is not None
    plan.dump(tmp_path / "plan.npz")
    loaded = StepPlan.load(tmp_path / "plan.npz", PLAN_PARTS)
    for name in StepPlan.__dataclass_fields__:
        assert np.array_equal(getattr(loaded, name), getattr(plan, name)), name
    with pytest.raises(ValueError, match="read-only"):
        plan.token_ids[0] = 1


def test_inputs_of_all_addons_are_saved_with_a_plan(tmp_path):
    core = make_core()
    core.add(make_request("a", [1, 2, 3]))
    core.step()
    plan = core.last_plan
    assert plan is not None and not plan.parts
    for number, kind in enumerate(PLAN_PARTS):
        arrays = [np.arange(6).reshape(2, 3) + number + i for i in range(len(fields(kind)))]
        plan = plan.with_part(kind(*arrays))
        with pytest.raises(ValueError, match="read-only"):
            arrays[0][:] = 0
    plan.dump(tmp_path / "plan.npz")
    loaded = StepPlan.load(tmp_path / "plan.npz", PLAN_PARTS)
    assert set(loaded.parts) == {*PLAN_PARTS}
    for kind in PLAN_PARTS:
        for entry in fields(kind):
            assert np.array_equal(
                getattr(loaded.part(kind), entry.name), getattr(plan.part(kind), entry.name)
            )
    with pytest.raises(KeyError, match="LoraPlan"):
        StepPlan.load(tmp_path / "plan.npz", [])


def test_every_addon_input_can_be_loaded():
    assert {kind.__name__ for kind in PlanPart.__subclasses__()} == {kind.__name__ for kind in PLAN_PARTS}


def test_a_step_starts_before_the_previous_tokens_are_known():
    core = make_core(overlap=True)
    core.add(make_request("a", [1, 2, 3], max_tokens=4))
    assert core.step() == [], "the first step is under way"
    outputs = core.step()
    assert core.last_plan is not None and core.last_plan.token_ids.tolist() == [-1]
    assert [o.token_ids for o in outputs] == [expected_tokens([1, 2, 3], 1)]
    assert run(core)["a", 0] == expected_tokens([1, 2, 3], 4)[1:]
    assert core.last_plan.step == 4, "no step is run for a token beyond the last"


def test_a_stop_token_ends_a_sequence_whose_next_step_has_started():
    first, second, *_ = expected_tokens([5, 6], 8)
    core = make_core(overlap=True)
    core.add(make_request("stops", [5, 6], end_token_ids=(second,)))
    core.add(make_request("goes on", [7]))
    tokens = run(core)
    assert tokens["stops", 0] == [first, second]
    assert tokens["goes on", 0] == expected_tokens([7], 8)
    assert core.scheduler.kv.pool.num_used == 0


def test_sync_only_requests_disable_overlap_while_they_run():
    core = make_core(overlap=True)
    core.add(make_request("a", [1], max_tokens=12))
    core.step()
    core.add(make_request("scores", [2, 3], max_tokens=2, prompt_logprobs=1))
    plans = []
    while core.has_work:
        core.step()
        plans.append(core.last_plan)
    ahead = [bool((plan.token_ids < 0).any()) for plan in plans]
    assert ahead[:2] == [False, False]
    assert any(ahead[2:])


HOST_STATE: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5, "temperature": 1.0, "seed": 1},
    "frequency": {"frequency_penalty": 0.6, "presence_penalty": 0.2, "temperature": 1.0, "seed": 2},
    "bias": {"logit_bias": {3: 1.5}, "temperature": 1.0, "seed": 3},
    "minimum": {"min_tokens": 5, "stop_token_ids": tuple(range(0, 97, 2))},
    "allowed": {"allowed_token_ids": tuple(range(5, 40)), "temperature": 0.8, "seed": 4},
    "n-grams": {"no_repeat_ngram_size": 1},
    "decay": {"temperature": 1.0, "seed": 5, "top_p": 0.9, "top_p_decay": 0.7},
    "logprobs": {"logprobs": 3, "temperature": 1.0, "seed": 6},
    "normalized": {"logprobs": 2, "normalize_logprobs": True, "temperature": 1.0, "top_k": 9, "seed": 7},
    "all logprobs": {"logprobs": -1},
    "logits": {"return_generation_logits": True, "presence_penalty": 0.5},
}


def test_requests_that_change_or_report_logits_overlap_and_equal_synchronous_steps():
    def outputs_of(overlap: bool) -> tuple[dict[str, list[SequenceOutput]], int]:
        core = make_core(overlap=overlap)
        for name, params in HOST_STATE.items():
            core.add(make_request(name, [len(name), 5, 5], max_tokens=9, **params))
        found: dict[str, list[SequenceOutput]] = {name: [] for name in HOST_STATE}
        num_ahead = 0
        while core.has_work:
            for output in core.step():
                assert not output.error
                found[output.request_id].append(output)
            core.check_integrity()
            num_ahead += bool((core.last_plan.token_ids < 0).any())
        return found, num_ahead

    overlapped, num_ahead = outputs_of(True)
    synchronous, none = outputs_of(False)
    assert num_ahead > 8 and not none
    for name in HOST_STATE:
        mine, theirs = overlapped[name], synchronous[name]
        assert [o.token_ids for o in mine] == [o.token_ids for o in theirs], name
        assert [o.logprobs for o in mine] == [o.logprobs for o in theirs], name
        assert [o.generation_logits for o in mine] == [o.generation_logits for o in theirs], name
        assert mine[-1].finish_reason == theirs[-1].finish_reason
    assert all(o.logprobs for name in ("logprobs", "normalized", "all logprobs") for o in overlapped[name])


def test_overlap_resumes_after_the_forks_of_a_request():
    core = make_core(overlap=True)
    core.add(make_request("several", [4, 5], n=3, max_tokens=8))
    assert core.scheduler.num_sync_only == 1
    core.step()
    assert core.scheduler.num_sync_only == 0
    tokens = run(core)
    assert all(len(tokens["several", index]) == 7 for index in range(3))


def test_a_failed_launch_fails_both_steps(monkeypatch):
    core = make_core(overlap=True)
    core.add(make_request("a", [1, 2]))
    core.step()

    def broken(plan):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(core.runner, "launch", broken)
    outputs = core.step()
    assert [o.token_ids for o in outputs] == [expected_tokens([1, 2], 1), []]
    assert "out of memory" in outputs[1].error
    assert not core.has_work
    core.check_integrity()
    monkeypatch.undo()
    core.add(make_request("b", [1, 2]))
    assert run(core)["b", 0] == expected_tokens([1, 2], 8)


def test_a_waiting_request_looks_up_the_prefix_cache_once(monkeypatch):
    core = make_core(num_blocks=20)
    prompt = list(range(40))
    core.add(make_request("first", prompt, 1))
    run(core)
    core.add(make_request("long", [50], 60))
    for _ in range(44):
        core.step()
    core.add(make_request("head", prompt, 30))
    lookups = []
    lookup = core.scheduler.kv.prefix_cache.lookup
    monkeypatch.setattr(PrefixCache, "lookup", lambda cache, key: lookups.append(key) or lookup(key))
    for _ in range(8):
        core.step()
        assert [s.request.request_id for s in core.scheduler.waiting] == ["head"]
    blocks_of_prompt = 10
    assert len(lookups) < blocks_of_prompt + 8, "the match is kept, and each step looks for one more block"
    run(core)
    core.check_integrity()
