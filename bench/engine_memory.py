"""Memory of an engine process under mixed load, compared with the part of its KV cache that was used.

    python bench/engine_memory.py --minutes 5

The cache is allocated at the start, but its pages become resident when they are first written. Memory therefore grows
until all blocks were used once, then a little until 256 compiled grammars are kept, and must be flat afterwards: the
script prints both, and compares the last quarters of the run. Each request has its own random prompt; kinds of
requests with state of their own (grammars, samplers, beams, several sequences, prompt scores, aborts) take turns. Exits
with 1 if memory still grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from contextlib import aclosing

import psutil
from smoke import parse_arguments

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.config import EngineConfig
from neso.generation import GenerationRequest, GuidedDecoding, SamplingParams
from neso.models import SHIPPED_MODELS

MIB = 1 << 20
CONCURRENCY = 6
MIN_READINGS = 60
"""Number of readings with a full cache, one per second, without which growth is not judged."""
ALLOWED_GROWTH = 0.03
"""Fraction by which mean memory may grow from the third to the last quarter of the run with a full cache."""


def sampling_of(rng: random.Random, number: int) -> SamplingParams:
    """Sampling parameters of the next kind of request."""
    name = f"field{number}"
    schema = json.dumps({"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]})
    kinds = (
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
        SamplingParams(n=3, seed=number, max_tokens=16),
        SamplingParams(beam_width=3, n=2, max_tokens=8),
        SamplingParams(logprobs=5, prompt_logprobs=2, max_tokens=8),
        SamplingParams(guided_decoding=GuidedDecoding(json=schema), max_tokens=24),
        SamplingParams(guided_decoding=GuidedDecoding(regex=f"[a-z]{{1,{number % 30 + 1}}}"), max_tokens=24),
        SamplingParams(logit_bias={rng.randrange(200): 2.0}, stop=(f"x{number}",), max_tokens=16),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1, min_p=0.05, max_tokens=16),
    )
    return kinds[number % len(kinds)]


class Load:
    """Workers that send requests until `end`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._rng = random.Random(0)
        self.sent = self.aborted = 0

    async def work(self, end: float) -> None:
        while time.monotonic() < end:
            self.sent += 1
            length = self._rng.choice((8, 60, 300, 900))
            prompt = [self._rng.randrange(5, self._engine.info.vocab_size) for _ in range(length)]
            params = sampling_of(self._rng, self.sent)
            abort = self._rng.random() < 0.2
            async with aclosing(self._engine.generate(GenerationRequest(prompt, params))) as outputs:
                async for _ in outputs:
                    if abort:
                        self.aborted += 1
                        break


async def run(minutes: float, num_blocks: int) -> int:
    """Run the load and print a line every few seconds. Returns the exit status."""
    options = {"num_blocks": num_blocks, "num_threads": 1}
    engine = await AsyncEngine.start(EngineConfig.from_options(str(SHIPPED_MODELS["neso-pilot"]), options))
    process = psutil.Process(engine._channel.process.pid)  # type: ignore[attr-defined]
    started = time.monotonic()
    end = started + minutes * 60
    per_block = engine.info.cache_bytes / engine.info.num_blocks
    load = Load(engine)
    workers = [asyncio.create_task(load.work(end)) for _ in range(CONCURRENCY)]
    most = 0
    readings: list[tuple[float, int, float]] = []  # seconds, most blocks used so far, MiB
    print(f"cache of {num_blocks} blocks, {engine.info.cache_bytes / MIB:.0f} MiB")
    print(f"{'seconds':>8} {'requests':>9} {'blocks':>7} {'cache MiB':>10} {'rss MiB':>8} {'rest MiB':>9}")
    try:
        while time.monotonic() < end:
            await asyncio.sleep(min(1.0, minutes * 6))
            stats = engine.stats
            # Cached blocks can be in use.
            most = max(most, min(num_blocks, stats.num_used_blocks + stats.num_cached_blocks))
            seconds, rss = time.monotonic() - started, process.memory_info().rss / MIB
            readings.append((seconds, most, rss))
            if len(readings) % 10 == 1:
                cache = most * per_block / MIB
                row = f"{seconds:8.0f} {load.sent:9} {most:7} {cache:10.0f} {rss:8.1f} {rss - cache:9.1f}"
                print(row, flush=True)
        await asyncio.gather(*workers)
        stats = await engine.check_integrity()
        assert stats.num_used_blocks == 0, "blocks are lost"
    finally:
        await engine.stop()
    print(f"{load.sent} requests, {load.aborted} aborted")
    filled = [rss for _, blocks, rss in readings if blocks >= num_blocks - 1]
    if len(filled) < MIN_READINGS:
        print("the run was too short for a verdict")
        return 0
    quarter = len(filled) // 4
    early, late = (sum(part) / quarter for part in (filled[-2 * quarter : -quarter], filled[-quarter:]))
    print(f"with a full cache: mean of the third quarter {early:.1f} MiB, of the last {late:.1f} MiB")
    return int(late > early * (1 + ALLOWED_GROWTH))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--blocks", type=int, default=2048, help="size of the KV cache")
    arguments = parse_arguments(parser, minutes=0.05, blocks=128)
    return asyncio.run(run(arguments.minutes, arguments.blocks))


if __name__ == "__main__":
    raise SystemExit(main())
