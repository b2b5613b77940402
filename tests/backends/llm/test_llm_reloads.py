"""Unloading a language model ends its engine process and releases all memory."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import numpy as np
import psutil
from eventually import until

from neso.server.core import Core
from neso.server.inference_request import InferenceRequest
from neso.server.options import ModelControlMode, ServerOptions
from neso.server.tensor import Tensor


async def use(core: Core) -> weakref.ref[object]:
    model = core.model("m")
    inputs = {"text_input": Tensor.from_numpy("text_input", np.array([b"What is"], np.object_))}
    stream = model.submit(InferenceRequest("m", inputs, parameters={"max_tokens": 2}))
    responses = [response async for response in stream]
    assert responses[-1].error is None, responses[-1].error
    return weakref.ref(model)


def taken() -> tuple[int, int, int]:
    process = psutil.Process()
    # The thread pool of the event loop may grow up to its maximum.
    threads = [
        thread for thread in threading.enumerate() if not thread.name.startswith(("asyncio_", "uvloop_"))
    ]
    return process.num_fds(), len(threads), len(process.children(recursive=True))


async def test_memory_of_a_language_model_is_released(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "llm"')
    (tmp_path / "m" / "1" / "model.json").write_text('{"model": "neso-pilot", "num_threads": 1}')
    core = Core(ServerOptions((tmp_path,), model_control_mode=ModelControlMode.EXPLICIT))
    await core.start()
    try:
        await core.load_model("m")
        await use(core)
        await core.unload_model("m")
        before, memory = taken(), psutil.Process().memory_info().rss
        for _ in range(3):
            await core.load_model("m")
            model = await use(core)
            assert psutil.Process().children()
            await core.unload_model("m")
            assert model() is None
        # Socket threads end asynchronously: those of the first engine may end after they were counted.
        await until(lambda: all(now <= then for now, then in zip(taken(), before, strict=True)))
        assert psutil.Process().memory_info().rss - memory < 32 << 20
    finally:
        await core.stop()
