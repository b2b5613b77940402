"""Host tier of the prefix cache: evicted blocks are stored on the host and loaded again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_engine import expected_tokens, make_core, make_request, run

from neso.engine.core.addon import RequestError
from neso.engine.core.block_pool import IntegrityError
from neso.engine.core.prefix_cache import HostCache


def prompt_of(i: int) -> list[int]:
    return [10 * i + k for k in range(9)] * 2


def serve(core, *numbers: int) -> None:
    for i in numbers:
        core.add(make_request(f"{i}", prompt_of(i), max_tokens=4))
        assert run(core)[f"{i}", 0] == expected_tokens(prompt_of(i), 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_evicted_blocks_are_not_computed_again(overlap):
    """The device cache holds one prompt at a time; the host cache holds all of them."""
    computed = {}
    for host_blocks in (0, 40):
        core = make_core(6, overlap, num_host_blocks=host_blocks)
        serve(core, 1, 2, 3)
        before = core.stats().prefix_hit_tokens
        serve(core, 1, 2, 3)
        computed[host_blocks] = core.stats().prefix_hit_tokens - before
    assert computed == {0: 0, 40: 3 * 16}
    assert core.stats().host_loaded_blocks == 12


def test_a_small_host_cache_keeps_the_latest_blocks():
    core = make_core(6, num_host_blocks=5)
    serve(core, 1, 2, 3)
    host = core.scheduler.kv.prefix_cache.host
    assert len(host) == 5 and host.stats.evicted_blocks > 0
    before = core.stats().prefix_hit_tokens
    serve(core, 2)
    assert core.stats().prefix_hit_tokens - before == 16


def test_a_preempted_sequence_reloads_its_blocks():
    core = make_core(12, num_host_blocks=40)
    for i in range(6):
        core.add(make_request(str(i), [i] * 8, max_tokens=20))
    assert run(core) == {(str(i), 0): expected_tokens([i] * 8, 20) for i in range(6)}
    assert core.scheduler.num_preemptions > 0
    assert core.stats().host_loaded_blocks > 0


def test_a_failed_step_drops_its_transfers(monkeypatch):
    core = make_core(6, num_host_blocks=40)
    serve(core, 1, 2)
    core.add(make_request("doomed", prompt_of(1), max_tokens=4))
    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "step", lambda plan: 1 / 0)
        (output,) = core.step()
    assert output.error and core.last_plan is not None and len(core.last_plan.block_transfers)
    core.check_integrity()
    assert core.stats().num_host_blocks == core.stats().num_cached_blocks == 0
    serve(core, 1, 2)


def test_transfers_of_a_cancelled_step_run_in_the_next(monkeypatch):
    core = make_core(6, num_host_blocks=40)
    serve(core, 1, 2)
    core.add(make_request("doomed", prompt_of(1), max_tokens=4))

    def fail_all(step, scheduler):
        return [(sequence, RequestError("called off")) for sequence in step.sequences]

    with monkeypatch.context() as patch:
        patch.setattr(core, "_preparers", [SimpleNamespace(prepare=fail_all)])
        core.step()
    core.check_integrity()
    serve(core, 1, 2)
    assert core.stats().host_loaded_blocks > 0


def test_integrity_check_detects_lost_blocks():
    host = HostCache(4)
    host.store("a", 1, 0)
    host.check_integrity()
    host.take("a")
    with pytest.raises(IntegrityError, match="blocks of the host"):
        host.check_integrity()
