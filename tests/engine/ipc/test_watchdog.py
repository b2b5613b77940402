"""Watchdog: hanging steps are dumped and end the engine process, as does a lost device."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import make_encoder
from eventually import until

import neso.engine.diagnostics.watchdog as watchdog
import neso.engine.runners.reference.runner as reference
from neso.engine.client.async_engine import AsyncEngine
from neso.engine.config import EngineConfig
from neso.engine.diagnostics.replay import read_engine, read_steps
from neso.engine.errors import EngineDead, EngineError
from neso.generation import GenerationRequest, SamplingParams
from neso.generation.pooling import PoolingRequest

# Python runs it at startup: the second step never ends.
HANGING = """
import time, types
import neso.engine.diagnostics.watchdog as watchdog
from neso.engine.runners.reference.runner import ReferenceRunner
step, hangs = ReferenceRunner.step, []
# No other step takes any time for it.
watchdog.time = types.SimpleNamespace(monotonic=lambda: time.monotonic() if hangs else 0.0)
def hang_in_second_step(self, plan):
    if plan.step == 2:
        hangs.append(True)
        time.sleep(1000)
    return step(self, plan)
ReferenceRunner.step = hang_in_second_step
"""

# The third step fails as after an illegal address on a GPU, where all later steps would fail too.
LOST = """
from neso.engine.runners.reference.runner import ReferenceRunner
step = ReferenceRunner.step
def fail_in_third_step(self, plan):
    if plan.step == 3:
        ReferenceRunner.has_lost_device = lambda self: True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return step(self, plan)
ReferenceRunner.step = fail_in_third_step
"""

# The same in the second batch of an encoder.
LOST_ENCODER = """
from neso.engine.runners.reference.encoder import ReferenceLayerStack
run, runs = ReferenceLayerStack.run, []
def fail_in_second_batch(self, x, starts):
    runs.append(len(x))
    if len(runs) == 2:
        ReferenceLayerStack.has_lost_device = lambda self: True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return run(self, x, starts)
ReferenceLayerStack.run = fail_in_second_batch
"""


def config_of(checkpoint: Path, timeout: float = 0.2) -> EngineConfig:
    options = {"runner": "reference", "num_blocks": 32, "step_timeout": timeout}
    return EngineConfig.from_options(str(checkpoint), options)


async def tokens_of(engine: AsyncEngine) -> list[int]:
    request = GenerationRequest([7, 8, 9], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    return [
        token async for out in engine.generate(request) for delta in out.deltas for token in delta.token_ids
    ]


async def dimensions_of(engine: AsyncEngine) -> int:
    return len((await engine.pool(PoolingRequest([7, 8, 9]))).values)


def folder_in(log: str) -> Path:
    found = re.search(r"stacks and plans are in (\S+)", log)
    assert found, log
    return Path(found[1])


async def test_a_hanging_step_ends_the_process(llama_checkpoint, tmp_path, monkeypatch, capfd):
    (tmp_path / "sitecustomize.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    engine = await AsyncEngine.start(config_of(llama_checkpoint))
    with pytest.raises(EngineDead, match="a step took longer than step_timeout"):
        await tokens_of(engine)
    assert not engine.alive
    folder = folder_in(capfd.readouterr().err)
    assert "hang_in_second_step" in (folder / "stacks.txt").read_text()
    assert [plan.step for plan in read_steps(folder)] == [1, 2]
    assert read_engine(folder).num_blocks == 32
    await engine.stop()


async def test_an_engine_in_a_thread_continues_after_a_slow_step(
    llama_checkpoint, monkeypatch, caplog, tmp_path
):
    """It logs once per step and ends nothing."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    held, step, now = threading.Event(), reference.ReferenceRunner.step, [0.0]

    def hold(self, plan):
        if plan.step == 2:
            now[0] = 1.0
            held.wait(60)
            now[0] = 0.0
        return step(self, plan)

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(reference.ReferenceRunner, "step", hold)
    engine = await AsyncEngine.start(config_of(llama_checkpoint), in_process=True)
    running = asyncio.create_task(tokens_of(engine))
    await until(lambda: "stacks and plans" in caplog.text)
    now[0] = 2.0
    await asyncio.sleep(0.3)
    held.set()
    assert len(await running) == 4
    assert caplog.text.count("stacks and plans") == 1
    await engine.stop()


async def test_steps_within_the_timeout_are_not_dumped(llama_checkpoint, caplog):
    engine = await AsyncEngine.start(config_of(llama_checkpoint, timeout=20.0), in_process=True)
    assert len(await tokens_of(engine)) == 4
    assert "has taken more than" not in caplog.text
    await engine.stop()


async def test_a_lost_device_ends_the_process_and_its_restart_serves(
    llama_checkpoint, tmp_path, monkeypatch, capfd
):
    (tmp_path / "sitecustomize.py").write_text(LOST)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    engine = await AsyncEngine.start(config_of(llama_checkpoint, timeout=60.0))
    with pytest.raises(EngineError, match=r"illegal memory access|its GPU failed"):
        await tokens_of(engine)
    await until(lambda: not engine.alive)
    with pytest.raises(EngineDead, match="its GPU failed"):
        await tokens_of(engine)
    assert "the device is lost" in capfd.readouterr().err
    (tmp_path / "sitecustomize.py").write_text("")
    await engine.restart()
    assert len(await tokens_of(engine)) == 4
    await engine.stop()


async def test_a_lost_device_ends_the_process_of_an_encoder(tmp_path, monkeypatch, capfd):
    (tmp_path / "sitecustomize.py").write_text(LOST_ENCODER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    engine = await AsyncEngine.start(config_of(make_encoder(tmp_path / "model", "bert"), timeout=60.0))
    dimensions = await dimensions_of(engine)
    with pytest.raises(EngineError, match=r"illegal memory access|its GPU failed"):
        await dimensions_of(engine)
    await until(lambda: not engine.alive)
    with pytest.raises(EngineDead, match="its GPU failed"):
        await dimensions_of(engine)
    assert "the device is lost" in capfd.readouterr().err
    (tmp_path / "sitecustomize.py").write_text("")
    await engine.restart()
    assert await dimensions_of(engine) == dimensions
    await engine.stop()
