"""Threads of the native runner: the same tokens with any number, fixed parts of matrices, binding to CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_builder import mixed_batch

import neso._native as _native
from neso import LLM, SamplingParams
from neso.engine.runners.native import packing
from neso.engine.runners.native.packing import Arena
from neso.engine.runners.native.runner import NativeRunner
from neso.engine.runners.registry import open_model
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
from neso.engine.specs.registry import decoder_spec
from neso.engine.thread_placement import BindingError, ThreadPlacement
from neso.engine.weights.checkpoint import Checkpoint

Factory = Callable[..., Path]
OWN = sorted(os.sched_getaffinity(0))
PROMPTS = ["What is paged attention?", "One two three four five six seven", "a" * 700]


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("threads", [1, 2, 3, 7, 16, 64, 128])
@pytest.mark.parametrize("shape", [(4096, 256), (6144, 128), (1000, 64), (40, 64)])
@pytest.mark.parametrize("rows", [1, 16, 700])
def test_each_panel_is_multiplied_by_its_owner(
    kind: str, threads: int, shape: tuple[int, int], rows: int
) -> None:
    """The owner allocates the memory of its panels. With a block of rows per thread, threads have rows instead."""
    owners = _native.panel_owners(-(-shape[0] // 16), threads)
    multiplied = np.zeros((len(owners), rows), int)
    for thread, chunks in enumerate(
        _native.chunks_by_thread(kind, *shape, rows, threads, _native.default_isa())
    ):
        for first_panel, last_panel, first_row, last_row in chunks:
            if rows < 256 * threads:
                assert owners[first_panel:last_panel] == [thread] * (last_panel - first_panel)
            multiplied[first_panel:last_panel, first_row:last_row] += 1
    assert (multiplied == 1).all(), "every row of every panel, once"


@pytest.mark.parametrize(("panels", "threads"), [(256, 64), (64, 64), (352, 2), (896, 128), (176, 48)])
def test_parts_differ_by_less_than_a_unit(panels: int, threads: int) -> None:
    parts = np.bincount(_native.panel_owners(panels, threads), minlength=threads)
    assert parts.sum() == panels
    assert parts.max() <= -(-panels // threads) * 1.1 + 1


@pytest.mark.parametrize("runner_options", [{"dtype": "float32"}, {}, {"quantization": "int8"}])
def test_same_tokens_with_any_number_of_threads(runner_options: dict[str, Any]) -> None:
    found = {}
    for threads in (1, 2, 8):
        llm = LLM("neso-pilot", num_threads=threads, num_blocks=256, **runner_options)
        outputs = llm.generate(
            PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), progress=False
        )
        found[threads] = [output.text for output in outputs]
    assert found[1] == found[2] == found[8]


def test_threads_are_bound_only_within_a_call() -> None:
    sets = [[OWN[thread % len(OWN)]] for thread in range(3)]
    assert _native.bound_cpus(3, sets) == sets
    assert sorted(os.sched_getaffinity(0)) == OWN, "the caller is bound only within the call"
    assert _native.bound_cpus(2, []) == [OWN, OWN]


def test_a_set_of_cpus_is_needed_for_each_thread() -> None:
    with pytest.raises(ValueError, match="a set of CPUs for each thread"):
        _native.bound_cpus(3, [[OWN[0]], [OWN[0]]])


def test_cpus_that_are_gone_are_ignored() -> None:
    """As when the cpuset of a container changes."""
    assert _native.bound_cpus(2, [[1023], [1023]]) == [OWN, OWN]


def test_loops_on_threads_that_share_a_core() -> None:
    """Bound to one CPU, threads are preempted in the middle of loops."""
    sets = [[OWN[0]]] * 12
    assert _native.loop_seconds(12, 20, sets) > 0


def test_runner_on_several_nodes(checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights and cache placed on nodes as on a machine with two (both threads on this one)."""
    monkeypatch.setattr(packing, "_PLACED_BYTES", 0)
    directory = checkpoint_factory("llama", dtype="bfloat16")
    expected, placed = (_logits(directory, monkeypatch, nodes) for nodes in ([], [0]))
    np.testing.assert_array_equal(expected, placed)


def _logits(directory: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[int]) -> np.ndarray:
    placement = ThreadPlacement(2, [OWN, OWN], nodes)
    monkeypatch.setattr("neso.engine.runners.native.runner.place_threads", lambda *_: placement)
    with Checkpoint(directory) as checkpoint:
        runner = NativeRunner.load(decoder_spec(checkpoint.config), checkpoint)
    return mixed_batch(runner)


def test_weights_are_touched_by_the_threads_that_multiply_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, list[list[int]]]] = []
    monkeypatch.setattr(
        _native, "touch_panels", lambda data, panels, cpus: calls.append((len(data), panels, cpus))
    )
    Arena(ThreadPlacement(2, [[0], [1]], [0, 1])).zeros(8 << 20, 128)
    Arena(ThreadPlacement(2, [[0], [1]], [0, 1])).zeros(1 << 20, 16)
    Arena(ThreadPlacement(2, [[0], [1]], [])).zeros(8 << 20, 128)
    assert calls == [(8 << 20, 128, [[0], [1]])], "only large matrices, and only on several nodes"


def test_touched_panels_are_allocated() -> None:
    data = _native.zero_pages(16 << 20)
    before = _resident()
    _native.touch_panels(data, 64, [OWN, OWN])
    assert _resident() - before > 14 << 20
    assert not data.any()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_interleaved_over_nodes() -> None:
    memory = _native.zero_pages(8 << 20)
    if not _native.interleave(memory, [0]):
        pytest.skip("the system does not allow mbind")
    address = memory.ctypes.data
    policies = [
        line for line in Path("/proc/self/numa_maps").read_text().splitlines() if f"{address:x}" in line
    ]
    assert any("interleave:0" in line for line in policies)


def test_binding_that_does_not_fit_is_rejected(checkpoint_factory: Factory) -> None:
    directory = checkpoint_factory("llama")
    options = RunnerOptions(num_threads=len(OWN) + 1, thread_binding="core")
    with Checkpoint(directory) as checkpoint, pytest.raises(BindingError, match="core needs a core for each"):
        NativeRunner.load(decoder_spec(checkpoint.config), checkpoint, options)


def test_loops_of_a_step_are_recorded(checkpoint_factory: Factory) -> None:
    with Checkpoint(checkpoint_factory("llama")) as checkpoint:
        runner = NativeRunner.load(decoder_spec(checkpoint.config), checkpoint, RunnerOptions(num_threads=2))
    loops = runner._decoder.record_loops(lambda: mixed_batch(runner) is None)
    assert any(is_product for _, is_product, _ in loops) and not all(is_product for _, is_product, _ in loops)
    assert all(0.5 <= share <= 1 and seconds > 0 for share, _, seconds in loops)


@pytest.mark.parametrize("runner", ["reference", "transformers"])
def test_other_runners_reject_a_binding(checkpoint_factory: Factory, runner: str) -> None:
    with (
        Checkpoint(checkpoint_factory("llama")) as checkpoint,
        pytest.raises(UnsupportedOption, match="thread_binding: node needs the native runner"),
    ):
        open_model(checkpoint, runner, RunnerOptions(thread_binding="node"), lambda length: length)
