"""An engine of vLLM that starts, but cannot be used, is shut down. vLLM itself is replaced."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from eventually import until

from neso.backends import vllm
from neso.server.errors import InvalidArgument


class Engine:
    model_config = SimpleNamespace(max_model_len=8)
    was_shut_down = False

    def shutdown(self) -> None:
        self.was_shut_down = True


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replacement of the module that imports vLLM. `engine`: the engine that it starts."""
    engine = Engine()
    library = SimpleNamespace(engine=engine, start_engine=lambda arguments, record: engine, asked=False)
    monkeypatch.setitem(sys.modules, "neso.backends.vllm.library", library)
    monkeypatch.setattr(vllm, "library", library, raising=False)
    return library


def engine_module() -> ModuleType:
    """Import a copy of the module, which uses `library`."""
    path = Path(vllm.__file__).with_name("engine.py")
    spec = importlib.util.spec_from_file_location("engine_without_vllm", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_engine_that_cannot_name_its_tasks_is_shut_down(library):
    async def supported_tasks(engine: Engine) -> frozenset[str]:
        raise RuntimeError("no tasks")

    library.supported_tasks = supported_tasks
    with pytest.raises(InvalidArgument, match="vLLM cannot load the model: no tasks"):
        await engine_module().VllmEngine.start(None)
    assert library.engine.was_shut_down


async def test_engine_is_shut_down_if_its_start_is_cancelled_while_it_is_asked(library):
    async def supported_tasks(engine: Engine) -> frozenset[str]:
        library.asked = True
        await asyncio.Event().wait()
        raise AssertionError

    library.supported_tasks = supported_tasks
    starting = asyncio.ensure_future(engine_module().VllmEngine.start(None))
    await until(lambda: library.asked)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert library.engine.was_shut_down


async def test_started_engine_has_tasks(library):
    async def supported_tasks(engine: Engine) -> frozenset[str]:
        return frozenset({"generate"})

    library.supported_tasks = supported_tasks
    engine = await engine_module().VllmEngine.start(None)
    assert engine.tasks == {"generate"} and not library.engine.was_shut_down
    await engine.stop()
    assert library.engine.was_shut_down
