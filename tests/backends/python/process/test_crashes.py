"""Crashes of model processes: their requests, other instances, and resources."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from core_requests import collect, send_request, send_slow_request
from eventually import until
from repository_builder import IDENTITY_TENSORS, RepositoryBuilder

from neso.backends import restarts
from neso.backends.python.process import process_instances as instance_module
from neso.backends.python.process.process_instances import State
from neso.server.core import Core
from neso.server.errors import ErrorCode, Restarting
from neso.server.inference_request import InferenceRequest
from neso.server.options import ServerOptions
from neso.server.tensor import Tensor

FRAGILE = """
import ctypes, os, signal, time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        if (Path(pb_utils.get_model_dir()) / "broken").exists():
            os._exit(5)

    def execute(self, requests):
        responses, folder = [], Path(pb_utils.get_model_dir())
        for request in requests:
            array = request.inputs()[0].as_numpy()
            action = array.flat[0]
            if action == -1:
                ctypes.string_at(0)
            if action == -2:
                os._exit(3)
            if action == -3:
                os.kill(os.getpid(), signal.SIGKILL)
            if action == -4:
                (folder / "begun").touch()
                while not (folder / "go").exists():
                    time.sleep(0.005)
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", np.full(array.shape, os.getpid(), np.float32))]))
        return responses
"""
DEATHS = {-1: "signal SIGSEGV", -2: "exit status 3", -3: "signal SIGKILL"}


@pytest.fixture
async def start(tmp_path: Path):
    """`await start(config)` returns a core with the model "fragile" in processes, and its folder."""
    cores: list[Core] = []

    async def make(config: str = "") -> tuple[Core, Path]:
        repository = RepositoryBuilder(tmp_path / "models")
        folder = repository.add("fragile", FRAGILE, IDENTITY_TENSORS + config)
        settings = {"python": {"execution-mode": "process"}}
        core = Core(ServerOptions((repository.path,), exit_timeout=1, backend_config=settings))
        cores.append(core)
        await core.start()
        return core, folder / "1"

    yield make
    for core in cores:
        await core.stop()


def send(core: Core, value: float, size: int = 1):
    return send_request(core.model("fragile"), IN=np.full(size, value, np.float32))


async def only_response(stream):
    (response,) = await asyncio.wait_for(collect(stream), 60)
    return response


async def pid_of(core: Core) -> int:
    response = await only_response(send(core, 1))
    assert response.error is None, response.error
    return int(response.output("OUT").array[0])


def all_up(core: Core) -> bool:
    return all(each.state is State.UP for each in core.model("fragile")._backend._instances._instances)


def descriptors() -> list[str]:
    """Return the open file descriptors of this process."""
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [os.readlink(path) for path in paths if os.path.lexists(path)]


def read_maps(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize("value", DEATHS)
async def test_crash_fails_the_request_and_restarts_the_instance(start, value):
    core, _ = await start()
    model, before = core.model("fragile"), await pid_of(core)
    dying, waiting = send(core, value), send(core, 2)
    error = (await only_response(dying)).error
    assert isinstance(error, Restarting) and error.code is ErrorCode.UNAVAILABLE
    assert "Stub process 'fragile_0_0' is not healthy" in error.message and DEATHS[value] in error.message
    assert not model.ready() and not await core.check_model_ready("fragile") and not core.ready()
    response = await only_response(waiting)  # the request queued after it
    assert response.error is None and int(response.output("OUT").array[0]) != before
    assert model.ready() and core.ready()
    assert not psutil.pid_exists(before) and model.in_flight_count == 0


async def test_unstarted_work_is_requeued_after_a_crash(start):
    core, folder = await start()
    streams = [send(core, -4), send(core, -2), *(send(core, 1) for _ in range(5))]
    await until((folder / "begun").exists)
    await asyncio.sleep(0.1)
    assert not streams[1].timeline.compute_start, "the first is still being executed"
    streams[3].cancel()
    (folder / "go").touch()
    outcomes = [await only_response(stream) for stream in streams]
    codes = [outcome.error and outcome.error.code for outcome in outcomes]
    assert codes == [None, ErrorCode.UNAVAILABLE, None, ErrorCode.CANCELLED, None, None, None]
    assert core.model("fragile").statistics.queue.ns > 0.2e9


async def test_crash_does_not_affect_other_instances(start):
    core, folder = await start("instance_group { count: 2 }")
    streams = [send(core, -4), send(core, -2), *(send(core, 1) for _ in range(20))]
    assert (await only_response(streams[1])).error is not None
    assert core.model("fragile").ready()
    (folder / "go").touch()
    for stream in streams[:1] + streams[2:]:
        assert (await only_response(stream)).error is None


async def test_crash_fails_the_whole_batch_and_batching_continues(start):
    core, _ = await start("max_batch_size: 8 dynamic_batching { }")
    model = core.model("fragile")
    row = [np.full((1, 1), value, np.float32) for value in (1, -2, 1, 1)]
    batch = [send_request(model, IN=row[0]), send_request(model, IN=row[1])]
    for stream in batch:
        assert (await only_response(stream)).error.code is ErrorCode.UNAVAILABLE
    for stream in [send_request(model, IN=row[2]), send_request(model, IN=row[3])]:
        assert (await only_response(stream)).error is None


async def test_idle_process_that_dies_is_restarted(start):
    core, _ = await start()
    before = await pid_of(core)
    (instance,) = core.model("fragile")._backend._instances._instances
    os.kill(before, signal.SIGKILL)
    await until(lambda: instance.reason)  # requests sent before its end is detected would fail with it
    assert await pid_of(core) != before


async def test_restart_delay_backs_off_exponentially(start, monkeypatch):
    monkeypatch.setattr(restarts, "MIN_DELAY", 0.2)
    core, _ = await start()
    started = time.monotonic()
    for stream in [send(core, -2) for _ in range(3)]:
        assert (await only_response(stream)).error is not None
    assert await pid_of(core)
    assert time.monotonic() - started > 0.2 + 0.4
    (instance,) = core.model("fragile")._backend._instances._instances
    assert instance._restarts.delay == 0, "a finished execution resets the failure count"
    assert (await only_response(send(core, -2))).error is not None and await pid_of(core)


async def test_sequence_continues_after_a_crash(start):
    core, _ = await start(
        "max_batch_size: 4 instance_group { count: 2 } sequence_batching { direct { } control_input "
        '{ name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } } }'
    )
    model = core.model("fragile")

    def step(value: float, **flags: bool):
        inputs = {"IN": Tensor.from_numpy("IN", np.full((1, 1), value, np.float32))}
        return model.submit(InferenceRequest("fragile", inputs, sequence_id=7, **flags))

    before = (await only_response(step(1, sequence_start=True))).output("OUT").array.item()
    dying, waiting = step(-2), step(1)
    assert (await only_response(dying)).error.code is ErrorCode.UNAVAILABLE
    assert (await only_response(waiting)).output("OUT").array.item() != before
    assert (await only_response(step(1, sequence_end=True))).error is None


async def test_instance_stays_down_after_repeated_failed_starts(start, monkeypatch):
    monkeypatch.setattr(restarts, "MIN_DELAY", 0.01)
    core, folder = await start()
    (folder / "broken").touch()
    dying, waiting = send(core, -2), send(core, 1)
    assert "exit status 3" in (await only_response(dying)).error.message
    started = time.monotonic()
    error = (await only_response(waiting)).error
    assert error.code is ErrorCode.UNAVAILABLE and "exit status 5" in error.message
    assert time.monotonic() - started > 0.01 * (1 + 2 + 4)
    assert "exit status 5" in (await only_response(send(core, 1))).error.message
    assert not core.model("fragile").ready()
    await core._lifecycle.unload("fragile", 1)


async def test_crash_in_initialize_fails_the_load(start):
    repository_error = "Stub process 'fragile_0_0' is not healthy: the process has ended (exit status 5)"
    _, folder = await start()
    (folder / "broken").touch()
    again = Core(
        ServerOptions((folder.parents[1],), backend_config={"python": {"execution-mode": "process"}})
    )
    await again.start()
    (entry,) = again.repository_index()
    assert repository_error in entry.reason
    await again.stop()


async def test_no_resources_are_leaked(start):
    me = psutil.Process()
    before, running, open_before = read_maps(me).count("/dev/shm/"), me.children(), Counter(descriptors())
    core, _ = await start("instance_group { count: 2 }")
    await pid_of(core)
    for _ in range(3):
        streams = [send(core, value, size=3_000_000) for value in (1, -3, 1, 1)]
        outcomes = [await only_response(stream) for stream in streams]
        assert sum(outcome.error is not None for outcome in outcomes) == 1
        del streams, outcomes
        await pid_of(core)
        await until(lambda: all_up(core))  # the crashed process was restarted
    gc.collect()
    assert sum("pidfd" in name for name in descriptors()) == 2
    assert "memfd:neso_python_backend" in read_maps(me)
    named = [
        read_maps(process).count("/dev/shm/") for process in (me, *me.children()) if process not in running
    ]
    assert named == [before, 0, 0], "shared memory has a name that could be left behind"
    await core.stop()
    assert me.children() == running
    gc.collect()
    new = Counter(descriptors()) - open_before
    assert not [name for name in new if "memfd" in name or "pidfd" in name]


async def test_unload_kills_a_process_that_does_not_return(start, monkeypatch):
    monkeypatch.setattr(instance_module, "END_TIMEOUT", 0.1)
    core, folder = await start()
    stream = send(core, -4)
    await until((folder / "begun").exists)
    await asyncio.wait_for(core._lifecycle.unload("fragile", 0.1), 60)
    assert (await only_response(stream)).error is not None


async def test_request_after_a_crash_succeeds(start):
    core, _ = await start()
    for value in (-2, -1, -2):
        assert (await only_response(send(core, value))).error is not None
        assert (await only_response(send_slow_request(core.model("fragile")))).error is None
