"""Requests per second of the in-process API, compared to the core's own event loop.

The model is an identity, FP32[16]. The baseline submits requests from a coroutine on the core's loop, without threads.
Each caller has one request in flight: `sync` callers are threads, `async` callers are tasks of another loop.

    python bench/inprocess_infer.py [--seconds 2] [--elements 16] [--concurrency 1 16]
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Callable

import numpy as np
import uvloop
from identity_model import identity_repository
from smoke import parse_arguments

import neso
from neso.server.inference_request import InferenceRequest
from neso.server.tensor import Tensor


def on_the_loop(server: neso.Server, value: np.ndarray, concurrency: int, seconds: float) -> float:
    """Requests per second of coroutines on the core's loop."""

    async def caller(end: float) -> int:
        count = 0
        while time.perf_counter() < end:
            for _ in range(10):
                request = InferenceRequest("identity", {"INPUT": Tensor.from_numpy("INPUT", value)})
                async for response in server.core.model("identity").submit(request):
                    assert response.outputs[0].array.shape == value.shape
                await asyncio.sleep(0)
                count += 1
        return count

    async def run() -> float:
        start = time.perf_counter()
        counts = await asyncio.gather(*(caller(start + seconds) for _ in range(concurrency)))
        return sum(counts) / (time.perf_counter() - start)

    return server.wait_for(run())


def sync(server: neso.Server, value: np.ndarray, concurrency: int, seconds: float) -> float:
    """Requests per second of threads that call `infer`."""
    model = server.model("identity")
    counts = [0] * concurrency
    start = time.perf_counter()

    def caller(index: int) -> None:
        while time.perf_counter() < start + seconds:
            for response in model.infer(inputs={"INPUT": value}):
                assert response.outputs["OUTPUT"].shape == value.shape
            counts[index] += 1

    threads = [threading.Thread(target=caller, args=(index,)) for index in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - start)


def asynchronous(server: neso.Server, value: np.ndarray, concurrency: int, seconds: float) -> float:
    """Requests per second of tasks that await `async_infer` on another loop."""
    model = server.model("identity")

    async def caller(end: float) -> int:
        count = 0
        while time.perf_counter() < end:
            async for response in model.async_infer(inputs={"INPUT": value}):
                assert response.outputs["OUTPUT"].shape == value.shape
            count += 1
        return count

    async def run() -> float:
        start = time.perf_counter()
        counts = await asyncio.gather(*(caller(start + seconds) for _ in range(concurrency)))
        return sum(counts) / (time.perf_counter() - start)

    return uvloop.run(run())


WAYS: dict[str, Callable[[neso.Server, np.ndarray, int, float], float]] = {
    "core's loop": on_the_loop,
    "sync": sync,
    "async": asynchronous,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--elements", type=int, default=16)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    options = parse_arguments(parser, seconds=0.1, concurrency=[2])
    value = np.zeros(options.elements, np.float32)
    with identity_repository() as repository, neso.Server(model_repository=repository) as server:
        print(f"FP32[{options.elements}]\nconcurrency  way           infer/s   CPU µs   ratio")
        for concurrency in options.concurrency:
            baseline = 0.0
            for name, measure in WAYS.items():
                measure(server, value, concurrency, 0.2)
                cpu, start = time.process_time(), time.perf_counter()
                rate = measure(server, value, concurrency, options.seconds)
                took = (time.process_time() - cpu) / (rate * (time.perf_counter() - start)) * 1e6
                baseline = baseline or rate
                print(
                    f"{concurrency:11d}  {name:12s} {rate:8.0f} {took:8.0f} {rate / baseline:7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
