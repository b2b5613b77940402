"""What the backend `tensorrtllm` costs: token ids in and out over gRPC streams and generate_stream, against the engine.

The engine runs alone in its process (`AsyncEngine`, no front end), then as the model `tensorrt_llm` of `neso serve`,
with a client in a process of its own; same checkpoint, prompts and settings, in turn, several rounds, medians.

usage: python bench/trtllm_backend.py [CHECKPOINT] [--concurrency 16] [--rounds 3] [--tokens 64]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import tritonclient.grpc.aio as grpc
from checkpoint import write_checkpoint

from neso.engine.async_engine import AsyncEngine
from neso.engine.config import EngineConfig
from neso.generation import GenerationRequest, SamplingParams

Prompt = list[int]
One = Callable[[Prompt], Awaitable[list[float]]]
CONFIG = """
backend: "tensorrtllm"
max_batch_size: 64
model_transaction_policy { decoupled: true }
parameters { key: "gpt_model_path" value { string_value: "CHECKPOINT" } }
"""


@dataclass
class Measured:
    """Arrival times (s) of the tokens of each request."""

    seconds: float = 0.0
    arrivals: list[list[float]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.arrivals)) / self.seconds

    @property
    def itl_ms(self) -> float:
        """Median over the requests of the mean time between two tokens."""
        return 1e3 * statistics.median((times[-1] - times[0]) / (len(times) - 1) for times in self.arrivals)


async def run(concurrency: int, prompts: list[Prompt], one: One) -> Measured:
    """`concurrency` workers take the prompts in turn, after a first round to warm up."""
    await asyncio.gather(*map(one, prompts[:concurrency]))
    measured, waiting = Measured(), iter(prompts)

    async def worker() -> None:
        for prompt in waiting:
            measured.arrivals.append(await one(prompt))

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    measured.seconds = time.perf_counter() - started
    return measured


async def bare(checkpoint: str, load: Load) -> Measured:
    options = {"batch_scheduler_policy": "guaranteed_no_evict"}
    engine = await AsyncEngine.start(EngineConfig.from_options(checkpoint, options))
    params = SamplingParams(temperature=0, max_tokens=load.tokens, ignore_eos=True)

    async def one(prompt: Prompt) -> list[float]:
        times = []
        async with aclosing(engine.generate(GenerationRequest(prompt, params))) as outputs:
            async for _ in outputs:
                times.append(time.perf_counter())
        return times

    try:
        return await run(load.concurrency, load.prompts(), one)
    finally:
        await engine.stop()


async def over_grpc(port: int, load: Load) -> Measured:
    """One stream for each request, as one client has for each user."""
    async with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:

        async def one(prompt: Prompt) -> list[float]:
            values = {
                "input_ids": np.array([prompt], np.int32),
                "input_lengths": np.array([[len(prompt)]], np.int32),
                "request_output_len": np.array([[load.tokens]], np.int32),
                "streaming": np.array([[True]]),
            }
            inputs = []
            for name, array in values.items():
                kind = "BOOL" if array.dtype == np.bool_ else "INT32"
                inputs.append(grpc.InferInput(name, list(array.shape), kind))
                inputs[-1].set_data_from_numpy(array)

            async def requests():  # type: ignore[no-untyped-def]
                yield {"model_name": "tensorrt_llm", "inputs": inputs}

            times = []
            async for _, error in client.stream_infer(requests()):
                assert error is None, error
                times.append(time.perf_counter())
            return times

        return await run(load.concurrency, load.prompts(), one)


async def over_http(port: int, load: Load) -> Measured:
    url = f"http://127.0.0.1:{port}/v2/models/tensorrt_llm/generate_stream"
    async with aiohttp.ClientSession() as session:

        async def one(prompt: Prompt) -> list[float]:
            body = {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": load.tokens}
            times = []
            async with session.post(url, data=orjson.dumps({**body, "streaming": True})) as answer:
                assert answer.status == 200, await answer.text()
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        times.append(time.perf_counter())
            return times

        return await run(load.concurrency, load.prompts(), one)


@dataclass(frozen=True)
class Load:
    concurrency: int
    tokens: int

    def prompts(self) -> list[Prompt]:
        rng = random.Random(0)
        return [[rng.randrange(6, 8000) for _ in range(32)] for _ in range(3 * self.concurrency)]


@contextmanager
def served(checkpoint: str, scratch: Path):  # type: ignore[no-untyped-def]
    """Ports of a `neso serve` process that is ready, by front end."""
    (scratch / "tensorrt_llm" / "1").mkdir(parents=True, exist_ok=True)
    config = CONFIG.replace("CHECKPOINT", str(Path(checkpoint).resolve()))
    (scratch / "tensorrt_llm" / "config.pbtxt").write_text(config)
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
    command = [sys.executable, "-m", "neso.cli", "serve", f"--model-repository={scratch}", *ports]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    found = {}
    try:
        for line in server.stdout:
            if match := re.match(r"  (http|grpc)\s+(\d+)", line):
                found[match.group(1)] = int(match.group(2))
            if line.startswith("Neso is ready"):
                break
        yield found
    finally:
        server.terminate()
        server.wait()


def one_round(checkpoint: str, scratch: Path, load: Load) -> dict[str, Measured]:
    measured = {"engine": asyncio.run(bare(checkpoint, load))}
    with served(checkpoint, scratch) as ports:
        measured["grpc"] = asyncio.run(over_grpc(ports["grpc"], load))
        measured["http"] = asyncio.run(over_http(ports["http"], load))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    load = Load(arguments.concurrency, arguments.tokens)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = f"{scratch}/checkpoint"
            write_checkpoint(Path(checkpoint), "m")
        rounds = [one_round(checkpoint, Path(scratch) / "models", load) for _ in range(arguments.rounds)]
    print(f"{'':>7} {'tok/s':>9} {'ITL ms':>8} {'of the engine':>14} {'its ITL':>8}")
    for name in rounds[0]:
        rate = statistics.median(found[name].tokens_per_second for found in rounds)
        itl = statistics.median(found[name].itl_ms for found in rounds)
        share = statistics.median(r[name].tokens_per_second / r["engine"].tokens_per_second for r in rounds)
        longer = statistics.median(r[name].itl_ms / r["engine"].itl_ms for r in rounds)
        print(f"{name:>7} {rate:>9.1f} {itl:>8.2f} {share:>14.3f} {longer:>8.3f}")


if __name__ == "__main__":
    main()
