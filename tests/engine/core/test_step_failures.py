"""Exceptions in a step or its preparation end the affected sequences with an error; the engine continues."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from fake_engine import expected_tokens, make_core, make_request, run
from test_drafts import RandomProposer

from neso.engine.beams.addon import BeamSearchAddon
from neso.generation import FinishReason

PLACES = {
    "schedule": lambda core: (core.scheduler, "schedule"),
    "grow": lambda core: (core.scheduler.kv, "try_grow"),
    "transfers": lambda core: (core.scheduler.kv.prefix_cache.host, "take_transfers"),
    "recording": lambda core: (core, "record"),
    "runner": lambda core: (core.runner, "step"),
    "advance": lambda core: (core.scheduler, "advance"),
    "register": lambda core: (core.scheduler, "register"),
    "sampler": lambda core: (core.selector.sampler, "_choose"),
    "append": lambda core: (core.selector, "append_tokens"),
    "beams": lambda core: (core.addon(BeamSearchAddon), "update"),
    "beam search": lambda core: (core.scheduler.sequences_of("beams")[0].group.search, "advance"),
}
NAMES = ("plain", "forks", "beams", "ends")


class Broken(RuntimeError):
    pass


def explode(*args, **kwargs):
    raise Broken("a defect")


def fill(core) -> None:
    core.add(make_request("plain", [1, 2, 3]))
    core.add(make_request("forks", [4, 5], n=3))
    core.add(make_request("beams", [6], beam_width=2, n=2))
    core.add(make_request("ends", [7, 8, 9], max_tokens=3))


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("place", PLACES)
def test_a_failing_step_ends_all_of_its_requests(monkeypatch, place, steps):
    """Includes requests that the step finished before it failed: without a final output they would wait forever."""
    core = make_core(num_host_blocks=4)
    fill(core)
    reported = [output for _ in range(steps) for output in core.step()]
    with monkeypatch.context() as patch:
        patch.setattr(*PLACES[place](core), explode, raising=False)
        reported += core.step()
        core.check_integrity()
    while core.has_work:
        reported += core.step()
        core.check_integrity()
    assert {output.request_id for output in reported if output.finish_reason} == set(NAMES)
    assert any("a defect" in output.error for output in reported)
    assert core.scheduler.kv.pool.num_used == 0
    core.add(make_request("next", [1, 2, 3]))
    assert run(core) == {("next", 0): expected_tokens([1, 2, 3], 8)}


@pytest.mark.parametrize("place", ["schedule", "recording", "launch", "advance", "register", "append"])
def test_overlapping_steps_fail_too(monkeypatch, place):
    core = make_core(overlap=True)
    core.add(make_request("a", [1, 2]))
    core.add(make_request("b", [3], max_tokens=2))
    reported = core.step()
    places = {**PLACES, "launch": lambda core: (core.runner, "launch")}
    with monkeypatch.context() as patch:
        patch.setattr(*places[place](core), explode)
        reported += core.step()
        core.check_integrity()
    while core.has_work:
        reported += core.step()
        core.check_integrity()
    assert {output.request_id for output in reported if output.finish_reason} == {"a", "b"}
    core.add(make_request("next", [1, 2, 3]))
    assert run(core) == {("next", 0): expected_tokens([1, 2, 3], 8)}


def test_an_unschedulable_request_does_not_block_other_requests(monkeypatch):
    core = make_core()
    core.add(make_request("poison", [66]))
    core.add(make_request("good", [1]))
    attach = core.scheduler.kv.attach_prefix

    def attach_all_but_one(sequence):
        if sequence.request.request_id == "poison":
            explode()
        attach(sequence)

    monkeypatch.setattr(core.scheduler.kv, "attach_prefix", attach_all_but_one)
    (response,) = core.step()
    assert (response.request_id, response.finish_reason) == ("poison", FinishReason.ERROR)
    core.check_integrity()
    assert run(core) == {("good", 0): expected_tokens([1], 8)}


def test_an_exception_in_add_ends_the_request(monkeypatch):
    core = make_core()
    monkeypatch.setattr("neso.engine.spec_decode.speculator.draft_of", explode)
    (response,) = core.add(make_request("a", [1]))
    assert (response.request_id, response.finish_reason) == ("a", FinishReason.ERROR)
    core.step()
    core.check_integrity()
    monkeypatch.undo()
    core.add(make_request("a", [1]))
    assert run(core) == {("a", 0): expected_tokens([1], 8)}


@pytest.mark.parametrize("method", ["propose", "complete", "observe"])
def test_a_failing_proposer_fails_no_request(monkeypatch, method):
    proposer = RandomProposer(1.0)
    core = make_core(proposer=proposer)
    for i in range(3):
        core.add(make_request(str(i), [i], 10 + i))
    calls = 0
    working = getattr(proposer, method)

    def second_time(*args):
        nonlocal calls
        calls += 1
        return working(*args) if calls == 1 else explode()

    monkeypatch.setattr(proposer, method, second_time)
    assert run(core) == {(str(i), 0): expected_tokens([i], 10 + i) for i in range(3)}
    assert calls > 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_without_memory_returns_its_blocks_and_intermediates(monkeypatch, overlap):
    """Also without a garbage collection: the next step needs the memory."""
    core = make_core(overlap=overlap)
    core.add(make_request("a", [1, 2, 3]))
    core.step()
    kept = []

    def run_out_of_memory(plan):
        activations = np.zeros(8)
        kept.append(weakref.ref(activations))
        raise MemoryError("out of memory")

    monkeypatch.setattr(core.runner, "launch" if overlap else "step", run_out_of_memory)
    gc.disable()
    try:
        outputs = core.step()
        assert kept and kept[0]() is None
    finally:
        gc.enable()
    assert "out of memory" in outputs[-1].error
    core.check_integrity()
    assert core.stats().num_used_blocks == 0
    monkeypatch.undo()
    core.add(make_request("b", [1, 2, 3]))
    assert run(core) == {("b", 0): expected_tokens([1, 2, 3], 8)}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("failing_step", range(3))
def test_a_failed_step_registers_no_blocks_in_the_prefix_cache(monkeypatch, overlap, failing_step):
    """The step's blocks may be partially written, so another request with the same prompt must not find them."""
    core = make_core(overlap=overlap, max_prefill_chunk=8)
    prompt = list(range(20))
    calls = 0
    working = core.runner.step

    def step(plan):
        nonlocal calls
        calls += 1
        if calls == failing_step + 1:
            explode()
        return working(plan)

    monkeypatch.setattr(core.runner, "step", step)
    core.add(make_request("fails", prompt))
    outputs = [output for _ in range(6) for output in core.step()]
    assert [output.finish_reason for output in outputs if output.finish_reason] == [FinishReason.ERROR]
    core.check_integrity()
    assert not core.has_work
    core.add(make_request("again", prompt))
    assert run(core) == {("again", 0): expected_tokens(prompt, 8)}
    assert core.stats().prefix_hit_tokens == 8 * failing_step, "the blocks of the steps that succeeded"
