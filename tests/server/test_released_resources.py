"""Unloading or replacing a model releases its resources."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import tracemalloc
import weakref

import numpy as np
import psutil
import pytest
from core_requests import collect, send_request
from eventually import until
from repository_builder import IDENTITY, IDENTITY_TENSORS, RepositoryBuilder

from neso.server.core import Core

MEGABYTES = 16
HEAVY = f"""
import numpy as np
import helper

TABLE = np.ones({MEGABYTES} << 18, np.float32)
""" + IDENTITY.replace(
    "class TritonPythonModel:",
    f"""
class TritonPythonModel:
    def initialize(self, args):
        self.weights = np.ones({MEGABYTES} << 18, np.float32)
""",
)


def add_heavy(repository: RepositoryBuilder, config: str = "", code: str = HEAVY) -> None:
    folder = repository.add("m", code, IDENTITY_TENSORS + config)
    (folder / "1" / "helper.py").write_text("x = 1")


async def use(core: Core, batches: bool) -> list[weakref.ref[object]]:
    """Send a request; return weak references to the objects of the model."""
    model = core.model("m")
    (response,) = await collect(send_request(model, IN=np.zeros((1, 3) if batches else 3, np.float32)))
    assert response.error is None, response.error
    return [
        weakref.ref(model),
        weakref.ref(model._backend),
        weakref.ref(model._backend._instances._threads[0].instance),
    ]


def model_threads() -> int:
    """Return the number of model threads that do not end; they may still be ending when an unload returns."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("model-m")]
    for thread in threads:
        thread.join(60)
    return sum(thread.is_alive() for thread in threads)


def resources_in_use() -> dict[str, int]:
    """Return the resources that must not increase."""
    process = psutil.Process()
    return {
        "files": process.num_fds(),
        "modules": len(sys.modules),
        "children": len(process.children()),
    }


def at_most(before: dict[str, int]) -> bool:
    """Compare the resources; there may be fewer if those of an earlier test were released meanwhile."""
    return all(count <= before[name] for name, count in resources_in_use().items())


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ("instance_group { count: 2 }", HEAVY),
        ("max_batch_size: 8 dynamic_batching { }", HEAVY),
        ("", HEAVY.replace("    def execute", "    async def execute")),
    ],
    ids=["instances", "batches", "async"],
)
async def test_python_models(repository: RepositoryBuilder, start_core, config: str, code: str) -> None:
    add_heavy(repository, config, code)
    core = await start_core(explicit=True)
    for _ in range(2):
        await core.load_model("m")
        await use(core, "dynamic" in config)
        await core.unload_model("m")
    gc.collect()
    before = resources_in_use()
    tracemalloc.start()
    try:
        for _ in range(15):
            await core.load_model("m")
            objects = await use(core, "dynamic" in config)
            await core.unload_model("m")
            assert model_threads() == 0
            assert [ref() for ref in objects] == [None, None, None]
        assert tracemalloc.get_traced_memory()[0] < MEGABYTES << 20
    finally:
        tracemalloc.stop()
    await until(lambda: at_most(before))


async def test_replaced_models(repository: RepositoryBuilder, start_core) -> None:
    add_heavy(repository)
    core = await start_core(explicit=True, startup_models=("m",))
    before = resources_in_use()
    for index in range(5):
        objects = await use(core, False)
        add_heavy(repository, f"parameters {{ key: 'n' value {{ string_value: '{index}' }} }}")
        await core.load_model("m")
        await asyncio.gather(*core._lifecycle._retiring)
        await until(lambda objects=objects: objects[-1]() is None)
        assert [ref() for ref in objects] == [None, None, None]
    await until(lambda: at_most(before))


async def test_models_that_failed_to_load(repository: RepositoryBuilder, start_core) -> None:
    add_heavy(repository, "instance_group { count: 2 }", HEAVY.replace("self.weights", "self.no.weights"))
    core = await start_core()
    (entry,) = core.repository_index()
    assert "AttributeError" in entry.reason
    assert not [name for name in sys.modules if name.startswith("neso_python_model_")]
    assert model_threads() == 0
