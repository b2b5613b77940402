"""Overhead of the backend `tensorrtllm`: token ids over gRPC streams and generate_stream, compared to the engine.

The engine runs in its own process (`AsyncEngine`, no frontend), then as the model `tensorrt_llm` of `neso serve` with
a client in another process, with the same checkpoint, prompts and settings. Prints medians of several rounds, in turns.

usage: python bench/trtllm_backend.py [CHECKPOINT] [--concurrency 16] [--rounds 3] [--tokens 64]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import tritonclient.grpc.aio as grpc
from checkpoint import write_checkpoint
from neso_server import served
from smoke import parse_arguments
from timed_requests import Measured, run

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.config import EngineConfig
from neso.generation import GenerationRequest, SamplingParams

Prompt = list[int]
CONFIG = """
backend: "tensorrtllm"
max_batch_size: 64
model_transaction_policy { decoupled: true }
parameters { key: "gpt_model_path" value { string_value: "CHECKPOINT" } }
"""


async def run_warm(load: Load, one: Callable[[Prompt], Awaitable[list[float]]]) -> Measured:
    """Run the load after a warm-up."""
    prompts = load.prompts()
    await run(load.concurrency, prompts[: load.concurrency], one, load.tokens)
    return await run(load.concurrency, prompts, one, load.tokens)


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
        return await run_warm(load, one)
    finally:
        await engine.stop()


async def over_grpc(port: int, load: Load) -> Measured:
    """Run the load with one stream per request."""
    async with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:

        async def one(prompt: Prompt) -> list[float]:
            values = {
                "input_ids": np.array([prompt], np.int32),
                "input_lengths": np.array([[len(prompt)]], np.int32),
                "request_output_len": np.array([[load.tokens]], np.int32),
                "end_id": np.array([[-1]], np.int32),
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

        return await run_warm(load, one)


async def over_http(port: int, load: Load) -> Measured:
    url = f"http://127.0.0.1:{port}/v2/models/tensorrt_llm/generate_stream"
    async with aiohttp.ClientSession() as session:

        async def one(prompt: Prompt) -> list[float]:
            body = {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": load.tokens}
            body |= {"end_id": -1, "streaming": True}
            times = []
            async with session.post(url, data=orjson.dumps(body)) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        times.append(time.perf_counter())
            return times

        return await run_warm(load, one)


@dataclass(frozen=True)
class Load:
    concurrency: int
    tokens: int

    def prompts(self) -> list[Prompt]:
        rng = random.Random(0)
        return [[rng.randrange(6, 8000) for _ in range(32)] for _ in range(3 * self.concurrency)]


def write_repository(repository: Path, checkpoint: str) -> None:
    """Write a repository with the model `tensorrt_llm`."""
    (repository / "tensorrt_llm" / "1").mkdir(parents=True)
    config = CONFIG.replace("CHECKPOINT", str(Path(checkpoint).resolve()))
    (repository / "tensorrt_llm" / "config.pbtxt").write_text(config)


def one_round(checkpoint: str, repository: Path, load: Load) -> dict[str, Measured]:
    measured = {"engine": asyncio.run(bare(checkpoint, load))}
    with served(f"--model-repository={repository}") as server:
        measured["grpc"] = asyncio.run(over_grpc(server.ports["grpc"], load))
        measured["http"] = asyncio.run(over_http(server.ports["http"], load))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parse_arguments(parser, concurrency=2, rounds=1, tokens=8)
    load = Load(arguments.concurrency, arguments.tokens)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = f"{scratch}/checkpoint"
            write_checkpoint(Path(checkpoint), "s" if arguments.smoke else "m")
        repository = Path(scratch) / "models"
        write_repository(repository, checkpoint)
        rounds = [one_round(checkpoint, repository, load) for _ in range(arguments.rounds)]
    print(f"{'':>7} {'tok/s':>9} {'ITL ms':>8} {'rate ratio':>14} {'ITL ratio':>8}")
    for name in rounds[0]:
        rate = statistics.median(found[name].tokens_per_second for found in rounds)
        itl = statistics.median(found[name].itl_ms for found in rounds)
        share = statistics.median(r[name].tokens_per_second / r["engine"].tokens_per_second for r in rounds)
        longer = statistics.median(r[name].itl_ms / r["engine"].itl_ms for r in rounds)
        print(f"{name:>7} {rate:>9.1f} {itl:>8.2f} {share:>14.3f} {longer:>8.3f}")


if __name__ == "__main__":
    main()
