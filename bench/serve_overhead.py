"""Overhead of serving: throughput and ITL through the OpenAI API, compared to the engine alone.

The engine runs in its own process (`AsyncEngine`, no frontend), then behind `neso serve` with a streaming client per
request, with the same checkpoint, prompts and settings. Prints medians of several rounds, in turns.

usage: python bench/serve_overhead.py [CHECKPOINT] [--concurrency 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

import aiohttp
import orjson
from checkpoint import write_checkpoint
from neso_server import served
from smoke import parse_arguments
from timed_requests import Measured, run

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.config import EngineConfig
from neso.generation import GenerationRequest, SamplingParams
from neso.models import SHIPPED_MODELS

TOKENS = 64


def prompts(count: int) -> list[str]:
    rng = random.Random(0)
    words = "def return class import self for in if not else while try except raise".split()
    return [" ".join(rng.choice(words) for _ in range(32)) for _ in range(count)]


async def bare(checkpoint: str, concurrency: int, texts: list[str]) -> Measured:
    engine = await AsyncEngine.start(EngineConfig.from_options(checkpoint, {}))
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)

    async def one(text: str) -> list[float]:
        times = []
        async with aclosing(engine.generate(GenerationRequest(text, params))) as outputs:
            async for output in outputs:
                # The frontend sends no chunk for incomplete characters, so they are not counted here.
                if any(delta.text for delta in output.deltas):
                    times.append(time.perf_counter())
        return times

    await run(concurrency, texts[:concurrency], one, TOKENS)
    try:
        return await run(concurrency, texts, one, TOKENS)
    finally:
        await engine.stop()


async def over_openai(port: int, concurrency: int, texts: list[str]) -> Measured:
    async def one(text: str) -> list[float]:
        body = {"model": "bench", "prompt": text, "max_tokens": TOKENS, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True}
        times = []
        async with session.post(
            f"http://127.0.0.1:{port}/v1/completions", data=orjson.dumps(body)
        ) as response:
            async for line in response.content:
                if line.startswith(b"data: {") and b'"text":""' not in line:
                    times.append(time.perf_counter())
        return times

    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session:
        await run(concurrency, texts[:concurrency], one, TOKENS)
        return await run(concurrency, texts, one, TOKENS)


def round_trip(checkpoint: str, concurrency: int, texts: list[str]) -> tuple[Measured, Measured]:
    """Measure the engine, then the server, with the same prompts."""
    alone = asyncio.run(bare(checkpoint, concurrency, texts))
    with served(f"bench={checkpoint}") as server:
        return alone, asyncio.run(over_openai(server.ports["openai"], concurrency, texts))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parse_arguments(
        parser, checkpoint=str(SHIPPED_MODELS["neso-pilot"]), concurrency=[2], rounds=1
    )
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = scratch
            write_checkpoint(Path(scratch), "m")
        print(f"{'concurrency':>11} {'':>8} {'tok/s':>9} {'ITL ms':>9}")
        for concurrency in arguments.concurrency:
            compare(checkpoint, concurrency, arguments.rounds)


def compare(checkpoint: str, concurrency: int, rounds: int) -> None:
    """Print the medians of both and the medians of their ratios."""
    texts = prompts(max(4, 2 * concurrency))
    pairs = [round_trip(checkpoint, concurrency, texts) for _ in range(rounds)]
    for name, column in (("engine", 0), ("served", 1)):
        rate = statistics.median(pair[column].tokens_per_second for pair in pairs)
        itl = statistics.median(pair[column].itl_ms for pair in pairs)
        print(f"{concurrency:>11} {name:>8} {rate:>9.1f} {itl:>9.2f}")
    rate = statistics.median(s.tokens_per_second / b.tokens_per_second for b, s in pairs)
    itl = statistics.median(s.itl_ms / b.itl_ms for b, s in pairs)
    print(f"{concurrency:>11} {'ratio':>8} {rate:>9.3f} {itl:>9.3f}", flush=True)


if __name__ == "__main__":
    main()
