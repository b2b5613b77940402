"""Requests per second of Python models in processes, compared to threads.

One core serves each model twice, in a thread and in a process; requests alternate between them, without a frontend.
"echo" returns its input, "fill" returns a new array of the same size. Copies: bytes copied to shared memory divided by
the bytes of the request's input.

usage: python bench/python_modes.py [--seconds 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from smoke import parse_arguments

from neso.backends.python.process.shared_memory import Arena, ArenaReader
from neso.server.core import Core
from neso.server.inference_request import InferenceRequest
from neso.server.model import Model
from neso.server.options import ServerOptions
from neso.server.tensor import Tensor

CONFIG = """
backend: "python"
input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}
parameters {{ key: "EXECUTION_MODE" value {{ string_value: "{mode}" }} }}
"""
CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", {out})]) for array in arrays]
"""
MODELS = {"echo": "array", "fill": "np.ones_like(array)"}
MODES = ("thread", "process")
SIZES = {"4 floats": 4, "64 KB": 1 << 14, "1 MB": 1 << 18, "16 MB": 1 << 22}


class CopyCounter:
    """Counts the bytes that both sides copy to shared memory."""

    def __init__(self) -> None:
        self.bytes = 0
        for kind, method, size in ((Arena, "allocate", int), (ArenaReader, "view", lambda block: block.size)):
            self._wrap(kind, method, size)

    def _wrap(self, kind: type, method: str, size: Callable[[Any], int]) -> None:
        plain = getattr(kind, method)

        def counted(owner: Any, argument: Any) -> Any:
            self.bytes += size(argument)
            return plain(owner, argument)

        setattr(kind, method, counted)


async def send_request(model: Model, array: np.ndarray) -> None:
    async for response in model.submit(InferenceRequest(model.name, {"IN": Tensor.from_numpy("IN", array)})):
        assert response.error is None, response.error
        assert response.outputs[0].array.shape == array.shape


async def rate(model: Model, size: int, concurrency: int, seconds: float) -> tuple[float, int]:
    """Requests per second, and number of requests."""
    array = np.ones(size, np.float32)
    end = time.perf_counter() + seconds
    count = 0

    async def worker() -> None:
        nonlocal count
        while time.perf_counter() < end:
            await send_request(model, array)
            count += 1

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return count / (time.perf_counter() - started), count


async def measure(core: Core, copies: CopyCounter, rounds: int, seconds: float) -> None:
    print(
        f"{'model':<6}{'tensor':<10}{'at once':>8}{'thread/s':>12}{'process/s':>12}{'ratio':>8}{'copies':>8}",
        flush=True,
    )
    for name in MODELS:
        for label, size in SIZES.items():
            for concurrency in (1, 8):
                rates: dict[str, list[float]] = {mode: [] for mode in MODES}
                copied = requested = 0
                for mode in MODES:
                    await rate(
                        core.model(f"{name}_{mode}"), size, concurrency, 0.2
                    )  # warm-up: the shared memory grows
                for _ in range(rounds):
                    for mode in MODES:
                        before = copies.bytes
                        per_second, count = await rate(
                            core.model(f"{name}_{mode}"), size, concurrency, seconds
                        )
                        rates[mode].append(per_second)
                        copied, requested = (
                            copied + copies.bytes - before,
                            requested + count * (mode == "process"),
                        )
                thread, process = (statistics.median(rates[mode]) for mode in MODES)
                print(
                    f"{name:<6}{label:<10}{concurrency:>8}{thread:>12,.0f}{process:>12,.0f}"
                    f"{process / thread:>8.2f}{copied / (requested * size * 4):>8.1f}",
                    flush=True,
                )


async def main(rounds: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, out in MODELS.items():
            for mode in MODES:
                model = Path(folder) / f"{name}_{mode}"
                (model / "1").mkdir(parents=True)
                (model / "config.pbtxt").write_text(CONFIG.format(mode=mode))
                (model / "1" / "model.py").write_text(CODE.format(out=out))
        core = Core(ServerOptions((Path(folder),)))
        await core.start()
        try:
            await measure(core, CopyCounter(), rounds, seconds)
        finally:
            await core.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parse_arguments(parser, seconds=0.05, rounds=1)
    uvloop.run(main(arguments.rounds, arguments.seconds))
