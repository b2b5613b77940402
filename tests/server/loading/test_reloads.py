"""Loading an already loaded model: effects and unchanged parts."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import numpy as np
import pytest
from core_requests import collect, index_of, send_request, send_slow_request
from eventually import until
from repository_builder import CONSTANT, IDENTITY_TENSORS, RepositoryBuilder

from neso.backends.python import thread_instances
from neso.server.core import Core
from neso.server.errors import ServerError
from neso.server.inference_response import ResponseStream
from neso.server.metadata import ModelState

COUNTED = """
import json, os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Says which instance it is, how many run at the same time, and how many the configuration has.'''

    running, most, lock = 0, 0, threading.Lock()

    def initialize(self, args):
        self.name = args["model_instance_name"]
        self.count = json.loads(args["model_config"])["instance_group"][0]["count"]
        if self.count > 8:
            raise RuntimeError("too many")

    def execute(self, requests):
        with self.lock:
            TritonPythonModel.running += 1
        time.sleep(0.005)
        with self.lock:
            TritonPythonModel.running -= 1
        out = np.array([self.name], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]) for _ in requests]

    def finalize(self):
        os.write(1, f"finalized {self.name}\\n".encode())
"""
COUNTED_TENSORS = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""


async def instances_of(core: Core, name: str = "m", requests: int = 40) -> set[str]:
    """Return the names of the responding instances."""
    streams = [send_request(core.model(name), IN=np.zeros(1, np.float32)) for _ in range(requests)]
    names = set()
    for stream in streams:
        (response,) = await collect(stream)
        assert response.error is None, response.error
        names.add(response.output("OUT").array.reshape(-1)[0].decode())
    return names


def alive_instances(model: Any) -> int:
    return sum(thread.alive for thread in model._backend._instances._threads)


async def test_loading_an_unchanged_model_has_no_effect(repository: RepositoryBuilder, start_core):
    repository.add("m")
    core = await start_core(explicit=True, startup_models=("m",))
    model = core.model("m")
    await core.load_model("m")
    assert core.model("m") is model
    await core.unload_model("m")
    await core.load_model("m")
    assert core.model("m") is not model


async def test_a_dead_model_is_reloaded(repository: RepositoryBuilder, start_core, monkeypatch):
    repository.add("m")
    core = await start_core(explicit=True, startup_models=("m",))
    model = core.model("m")
    monkeypatch.setattr(model._backend, "ready", lambda: False)
    await core.load_model("m")
    assert core.model("m") is not model and core.model("m").ready()


OVERRIDE = json.dumps(
    {
        "backend": "python",
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}],
        "parameters": {"by": {"string_value": "request"}},
    }
)


def is_overridden(core: Core) -> bool:
    return core.model("m").config.parameters["by"].string_value == "request"


async def test_a_load_without_configuration_keeps_an_override(repository: RepositoryBuilder, start_core):
    repository.add("m")
    core = await start_core(explicit=True, startup_models=("m",))
    await core.load_model("m", OVERRIDE)
    model = core.model("m")
    await core.load_model("m")
    assert core.model("m") is model and is_overridden(core)
    (repository.path / "m" / "1" / "model.py").write_text(CONSTANT.format(value=7))
    await core.load_model("m")
    assert core.model("m") is not model and is_overridden(core), "reloaded with the kept configuration"
    (response,) = await collect(send_request(core.model("m"), IN=np.zeros(1, np.float32)))
    assert response.output("OUT").array[0] == 7


@pytest.mark.parametrize("change", ["write", "touch", "unload"])
async def test_an_override_ends_with_a_change_of_the_configuration(
    repository: RepositoryBuilder, start_core, change: str
):
    repository.add("m")
    core = await start_core(explicit=True, startup_models=("m",))
    await core.load_model("m", OVERRIDE)
    if change == "unload":
        await core.unload_model("m")
    elif change == "touch":
        os.utime(repository.path / "m" / "config.pbtxt", ns=(1, 1))
    else:
        repository.configure(
            "m", IDENTITY_TENSORS + "parameters { key: 'other' value { string_value: '1' } }"
        )
    await core.load_model("m")
    assert not is_overridden(core)
    assert ("other" in core.model("m").config.parameters) == (change == "write")


async def test_an_override_with_files_ends_with_the_next_load(repository: RepositoryBuilder, start_core):
    repository.add("m")
    core = await start_core(explicit=True, startup_models=("m",))
    code = (repository.path / "m" / "1" / "model.py").read_bytes()
    await core.load_model("m", OVERRIDE, {"file:1/model.py": code})
    assert is_overridden(core)
    await core.load_model("m")
    assert not is_overridden(core)


@pytest.mark.parametrize("batching", ["", "max_batch_size: 4 dynamic_batching { }"])
async def test_instances_are_added_and_removed_under_load(repository, start_core, batching, capfd):
    def group(count: int) -> str:
        return COUNTED_TENSORS + batching + f" instance_group {{ count: {count} }}"

    repository.add("m", COUNTED, group(2))
    core = await start_core(explicit=True, startup_models=("m",))
    model = core.model("m")
    stop = asyncio.Event()

    async def send() -> int:
        sent = 0
        while not stop.is_set():
            array = np.zeros((1, 1) if batching else 1, np.float32)
            (response,) = await collect(send_request(core.model("m"), IN=array))
            assert response.error is None, response.error
            sent += 1
        return sent

    senders = [asyncio.ensure_future(send()) for _ in range(20)]
    for count in (4, 1, 3, 2):
        repository.configure("m", group(count))
        await core.load_model("m")
        assert core.model("m") is model
        assert model.config.instance_group[0].count == count
        await until(lambda count=count: alive_instances(model) == count)
    stop.set()
    assert sum(await asyncio.gather(*senders)) >= 20
    names = [line.split()[1] for line in capfd.readouterr().out.splitlines()]
    assert len(names) == 4  # three when four became one, and one when three became two
    assert set(names) <= {f"m_0_{index}" for index in range(4)}


async def test_draining_instances_are_not_counted(repository, start_core, tmp_path, monkeypatch):
    monkeypatch.setattr(
        thread_instances, "END_TIMEOUT", 0.01
    )  # a load waits no longer for the busy instances
    go = tmp_path / "go"
    code = f"""
    import pathlib, time
    class TritonPythonModel:
        def execute(self, requests):
            while not pathlib.Path({str(go)!r}).exists():
                time.sleep(0.005)
            return [None]
    """

    def group(count: int) -> str:
        return IDENTITY_TENSORS + f"instance_group {{ count: {count} }}"

    async def fill(instances: int) -> list[ResponseStream]:
        streams = [send_slow_request(core.model("m")) for _ in range(instances)]
        await until(lambda: all(stream.timeline.compute_start for stream in streams))
        return streams

    repository.add("m", code, group(2))
    core = await start_core(explicit=True, startup_models=("m",))
    busy = await fill(2)
    for count in (1, 3):
        repository.configure("m", group(count))
        await core.load_model("m")
    go.touch()
    for stream in busy:
        await collect(stream)
    go.unlink()
    await fill(3)
    go.touch()


async def test_a_failed_instance_leaves_the_model_unchanged(repository: RepositoryBuilder, start_core):
    repository.add("m", COUNTED, COUNTED_TENSORS)
    core = await start_core(explicit=True, startup_models=("m",))
    model = core.model("m")
    repository.configure("m", COUNTED_TENSORS + "instance_group { count: 9 }")
    with pytest.raises(ServerError, match="too many"):
        await core.load_model("m")
    assert core.model("m") is model and model.ready()
    assert model.config.instance_group[0].count == 1
    assert len(await instances_of(core)) == 1


async def test_other_instance_changes_reload_the_model(repository: RepositoryBuilder, start_core):
    repository.add("m", COUNTED, COUNTED_TENSORS)
    core = await start_core(explicit=True, startup_models=("m",))
    model = core.model("m")
    two = "instance_group [ { name: 'a' count: 2 }, { name: 'b' count: 2 } ]"
    repository.configure("m", COUNTED_TENSORS + two)
    await core.load_model("m")
    assert core.model("m") is not model
    assert await instances_of(core) == {"a_0", "a_1", "b_0", "b_1"}
    model = core.model("m")
    repository.configure("m", COUNTED_TENSORS + two.replace("2", "3"))
    await core.load_model("m")
    assert core.model("m") is model and len(await instances_of(core)) == 6


async def test_an_override_of_instances_keeps_the_model(repository: RepositoryBuilder, start_core):
    repository.add("m", COUNTED, COUNTED_TENSORS)
    core = await start_core(explicit=True, startup_models=("m",))
    model = core.model("m")
    config = {
        "backend": "python",
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]}],
        "instance_group": [{"count": 3}],
    }
    await core.load_model("m", json.dumps(config))
    assert core.model("m") is model and len(await instances_of(core)) == 3
    repository.configure("m", COUNTED_TENSORS)
    await core.load_model("m")
    assert core.model("m") is model and len(await instances_of(core)) == 1


async def test_reloads_drop_no_requests(repository: RepositoryBuilder, start_core):
    repository.add_constant("m", 0, config=IDENTITY_TENSORS + "instance_group { count: 2 }")
    core = await start_core(explicit=True, startup_models=("m",))
    answered: list[float] = []
    stop = asyncio.Event()

    async def send() -> None:
        while not stop.is_set():
            (response,) = await collect(send_request(core.model("m"), IN=np.zeros(1, np.float32)))
            assert response.error is None, response.error
            answered.append(float(response.output("OUT").array[0]))

    senders = [asyncio.ensure_future(send()) for _ in range(200)]
    for value in range(1, 11):
        # The code loads slowly, so that the old model serves requests meanwhile.
        code = "import time\ntime.sleep(0.02)\n" + CONSTANT.format(value=value)
        repository.add(
            "m", code, IDENTITY_TENSORS + f"parameters {{ key: 'n' value {{ string_value: '{value}' }} }}"
        )
        await core.load_model("m")
        seen = len(answered)
        (response,) = await collect(send_request(core.model("m"), IN=np.zeros(1, np.float32)))
        assert response.output("OUT").array[0] == value
        await until(lambda seen=seen: len(answered) >= seen + 200)
    stop.set()
    await asyncio.gather(*senders)
    assert set(answered) >= set(range(1, 11)) and len(answered) > 2000
    await asyncio.gather(*core._lifecycle._retiring)
    assert [entry.version for entry in index_of(core, "m")] == ["1"]


async def test_retries(repository: RepositoryBuilder, start_core, tmp_path):
    code = f"""
    from pathlib import Path
    class TritonPythonModel:
        def initialize(self, args):
            tries = Path({str(tmp_path / "tries")!r})
            count = len(tries.read_text()) if tries.exists() else 0
            tries.write_text("x" * (count + 1))
            assert count == 2, "not yet"
        def execute(self, requests):
            return []
    """
    repository.add("m", code)
    core = await start_core(explicit=True, model_load_retry_count=1)
    with pytest.raises(ServerError, match="not yet"):
        await core.load_model("m")
    await core.load_model("m")
    assert (tmp_path / "tries").read_text() == "xxx"


async def test_concurrent_loads_are_limited(repository: RepositoryBuilder, start_core, tmp_path):
    code = f"""
    import os, time
    class TritonPythonModel:
        def initialize(self, args):
            with open({str(tmp_path / "log")!r}, "ab", buffering=0) as log:
                log.write(b"+")
                while not os.path.exists({str(tmp_path / "go")!r}):
                    time.sleep(0.005)
                log.write(b"-")
        def execute(self, requests):
            return []
    """
    for index in range(5):
        repository.add(f"m{index}", code)
    starting = asyncio.ensure_future(start_core(model_load_thread_count=2))
    await until(lambda: (tmp_path / "log").exists() and len((tmp_path / "log").read_text()) >= 2)
    await asyncio.sleep(0.05)  # to detect loads that start too early
    (tmp_path / "go").touch()
    assert (await starting).ready()
    loading = most = 0
    for sign in (tmp_path / "log").read_text():
        loading += 1 if sign == "+" else -1
        most = max(most, loading)
    assert most == 2


async def test_nested_loads_release_the_load_slot(repository, start_core):
    code = """
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def initialize(self, args):
            pb_utils.load_model("leaf_" + args["model_name"])
            assert pb_utils.is_model_ready("leaf_" + args["model_name"])
        def execute(self, requests):
            return []
    """
    for name in ("a", "b", "c"):
        repository.add(name, code)
        repository.add(f"leaf_{name}")
    core = await start_core(explicit=True, startup_models=("a", "b", "c"), model_load_thread_count=1)
    assert core.ready() and len(core.models()) == 6


async def test_a_model_that_loads_itself_during_its_load(repository, start_core):
    code = """
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def initialize(self, args):
            pb_utils.load_model(args["model_name"])
        def execute(self, requests):
            return []
    """
    repository.add("m", code)
    core = await asyncio.wait_for(start_core(explicit=True, startup_models=("m",)), 60)
    assert "models depend on each other in a cycle: m -> m" in index_of(core, "m")[0].reason


async def test_an_unload_waits_for_the_load_of_an_ensemble(
    repository: RepositoryBuilder, start_core, tmp_path
):
    go = tmp_path / "go"
    code = f"""
    import pathlib, time
    class TritonPythonModel:
        def initialize(self, args):
            while not pathlib.Path({str(go)!r}).exists():
                time.sleep(0.005)
        def execute(self, requests):
            return [None for _ in requests]
    """
    repository.add("step", code)
    repository.add_ensemble("all", "step")
    core = await start_core(explicit=True)
    load = asyncio.ensure_future(core.load_model("all"))
    await until(lambda: [entry.state for entry in index_of(core, "step")] == [ModelState.LOADING])
    unload = asyncio.ensure_future(core.unload_model("step"))
    await asyncio.sleep(0.05)
    assert not unload.done()
    go.touch()
    await asyncio.gather(load, unload)
    assert core.models() == []
