"""`AsyncEngine.restart` after the end of the engine process, and detection of a hanging process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
from eventually import until
from peft_adapters import greedy_with, write_adapter

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.config import EngineConfig
from neso.engine.core.stats import DraftStats, EngineStats
from neso.engine.errors import EngineDead, EngineError
from neso.generation import GenerationRequest, InvalidParameter, LoraRequest, SamplingParams

PROMPT = list(range(7, 47))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


async def tokens_of(
    engine: AsyncEngine, params: SamplingParams = GREEDY, lora: str | None = None
) -> list[int]:
    request = GenerationRequest(PROMPT, params, lora=None if lora is None else LoraRequest(name=lora))
    async with aclosing(engine.generate(request)) as outputs:
        return [token async for output in outputs for delta in output.deltas for token in delta.token_ids]


def process_of(engine: AsyncEngine) -> psutil.Process:
    return psutil.Process(engine._channel.process.pid)  # type: ignore[attr-defined]


async def start(checkpoint: Path, **options: object) -> AsyncEngine:
    options = {"runner": "reference", "num_blocks": 64, **options}
    return await AsyncEngine.start(EngineConfig.from_options(str(checkpoint), options))


def descriptors() -> int:
    return psutil.Process().num_fds()


async def test_restarted_engine_generates_the_same_tokens(llama_checkpoint):
    engine = await start(llama_checkpoint)
    dead: list[str] = []
    engine.on_dead(dead.append)
    try:
        expected = await tokens_of(engine)
        before = descriptors()
        for number in range(1, 4):
            generation = engine.generate(GenerationRequest(PROMPT, ENDLESS))
            await anext(generation)
            process_of(engine).kill()
            with pytest.raises(EngineDead, match="SIGKILL"):
                async for _ in generation:
                    pass
            assert len(dead) == number and not engine.alive and engine.num_requests == 0
            assert (engine.stats.num_running, engine.stats.num_used_blocks) == (0, 0)
            with pytest.raises(EngineDead):
                await tokens_of(engine)
            with pytest.raises(EngineDead):
                await engine.check_integrity()
            steps = engine.stats.step
            await engine.restart()
            assert engine.alive and await tokens_of(engine) == expected
            assert engine.stats.step > steps, "counters go on"
            steps = engine.stats.step
            assert (await engine.check_integrity()).num_used_blocks == 0
            assert engine.stats.step == steps, "a check of the accounting keeps the counters"
        assert descriptors() == before
    finally:
        await engine.stop()


async def test_adapters_are_restored(llama_checkpoint, tmp_path):
    paths = {
        name: write_adapter(llama_checkpoint, tmp_path / name, seed=i)
        for i, name in enumerate(("first", "second", "third", "gone"))
    }
    expected = {
        name: greedy_with(llama_checkpoint, path, [PROMPT], GREEDY.max_tokens)[0]
        for name, path in paths.items()
    }
    modules = {"first": str(paths["first"]), "second": str(paths["second"])}
    engine = await start(llama_checkpoint, lora_modules=modules, allow_runtime_lora=True)
    try:
        await engine.load_lora(LoraRequest(name="third", path=str(paths["third"])))
        await engine.load_lora(LoraRequest(name="first", path=str(paths["third"])))  # replaces its weights
        await engine.load_lora(LoraRequest(name="gone", path=str(paths["gone"])))
        await engine.unload_lora("second")
        shutil.rmtree(paths["gone"])
        process_of(engine).kill()
        await until(lambda: not engine.alive)
        await engine.restart()
        assert set(engine.list_loras()) == {"first", "third"}
        assert await tokens_of(engine, lora="first") == expected["third"]
        assert await tokens_of(engine, lora="third") == expected["third"]
        for name in ("second", "gone"):
            with pytest.raises(InvalidParameter, match="not supported"):
                await tokens_of(engine, lora=name)
    finally:
        await engine.stop()


async def test_failed_restart_can_be_repeated(llama_checkpoint, tmp_path):
    checkpoint = shutil.copytree(llama_checkpoint, tmp_path / "model")
    engine = await start(checkpoint)
    try:
        expected = await tokens_of(engine)
        before = descriptors()
        process_of(engine).kill()
        await until(lambda: not engine.alive)
        (checkpoint / "config.json").rename(tmp_path / "config.json")
        for _ in range(2):
            with pytest.raises(EngineError):
                await engine.restart()
            assert not engine.alive
        (tmp_path / "config.json").rename(checkpoint / "config.json")
        await engine.restart()
        assert await tokens_of(engine) == expected
        assert descriptors() == before
    finally:
        await engine.stop()


async def test_process_that_cannot_be_started_leaves_nothing(llama_checkpoint, monkeypatch, tmp_path):
    def fail(*arguments: object, **options: object) -> None:
        raise OSError("Cannot allocate memory")

    engine = await start(llama_checkpoint)
    try:
        before = descriptors()
        process_of(engine).kill()
        await until(lambda: not engine.alive)
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", fail)
            patch.setattr(tempfile, "tempdir", str(tmp_path))
            for _ in range(3):
                with pytest.raises(OSError, match="Cannot allocate memory"):
                    await engine.restart()
        assert not any(tmp_path.iterdir())
        await engine.restart()
        await until(lambda: descriptors() == before)
    finally:
        await engine.stop()


async def test_stopped_process_is_killed(llama_checkpoint):
    engine = await start(llama_checkpoint, heartbeat_timeout=1.0)
    try:
        process = process_of(engine)
        generation = engine.generate(GenerationRequest(PROMPT, ENDLESS))
        await anext(generation)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineDead, match="did not respond for 1 s and was killed"):
            async for _ in generation:
                pass
        assert not process.is_running()
    finally:
        await engine.stop()


# Python runs it at startup: the second step holds the GIL forever. `PyOS_string_to_double` etc. return; a regular
# expression with catastrophic backtracking does not, and `re` holds the GIL.
GIL_HANG = """
import re
from neso.engine.runners.reference.runner import ReferenceRunner
step = ReferenceRunner.step
def hang_in_the_second(self, plan):
    if plan.step == 2:
        re.match(r"(a|a)*b", "a" * 200)
    return step(self, plan)
ReferenceRunner.step = hang_in_the_second
"""
# The load and each step take longer than the heartbeat's timeout, the load while it holds the GIL.
SLOW = """
import re, time
import neso.engine.load.loader as loader
from neso.engine.runners.reference.runner import ReferenceRunner
step, load = ReferenceRunner.step, loader.load_engine
def slow_load(config):
    started, length = time.monotonic(), 18
    while time.monotonic() - started < 2.0:
        re.match(r"(a|a)*b", "a" * length)
        length += 1
    return load(config)
def slow_step(self, plan):
    if plan.step <= 2:
        time.sleep(2.0)
    return step(self, plan)
loader.load_engine, ReferenceRunner.step = slow_load, slow_step
"""


def patch_children(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    (folder / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))


async def test_step_that_holds_the_gil_forever_is_killed(llama_checkpoint, monkeypatch, tmp_path):
    """The watchdog inside the process cannot detect it, because its thread does not run either."""
    patch_children(monkeypatch, tmp_path, GIL_HANG)
    engine = await start(llama_checkpoint, heartbeat_timeout=1.0)
    try:
        with pytest.raises(EngineDead, match="did not respond for 1 s"):
            await tokens_of(engine)
    finally:
        await engine.stop()


async def test_slow_load_and_slow_steps_are_no_hangs(llama_checkpoint, monkeypatch, tmp_path):
    patch_children(monkeypatch, tmp_path, SLOW)
    engine = await start(llama_checkpoint, heartbeat_timeout=0.8)
    try:
        assert len(await tokens_of(engine)) == GREEDY.max_tokens
    finally:
        await engine.stop()


async def test_process_that_stops_while_it_loads_is_killed(llama_checkpoint, monkeypatch, tmp_path):
    patch_children(monkeypatch, tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")
    with pytest.raises(EngineDead, match="did not respond for 2 s"):
        await start(llama_checkpoint, heartbeat_timeout=1.0, step_timeout=2.0)


async def test_stop_kills_a_stopped_process(llama_checkpoint):
    engine = await start(llama_checkpoint, heartbeat_timeout=0)
    process = process_of(engine)
    process.send_signal(signal.SIGSTOP)
    await engine.stop(timeout=0.2)
    assert not process.is_running()


def test_counters_continue_after_a_restart():
    earlier = EngineStats(step=10, num_running=3, preemptions=2, drafts=DraftStats(5, 9, 4, [3, 1]))
    now = EngineStats(step=1, num_running=1, prefix_hit_tokens=7, drafts=DraftStats(1, 1, 1, [1]))
    stats = now.after(earlier)
    assert (stats.step, stats.preemptions, stats.prefix_hit_tokens, stats.num_running) == (11, 2, 7, 1)
    assert stats.drafts == DraftStats(6, 10, 5, [4, 1])
