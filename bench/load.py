"""A closed-loop load on an OpenAI completions endpoint: throughput, TTFT, ITL, goodput.

Prompts are random token ids, all different: no prefix of one is in another's cache.

usage: python bench/load.py URL MODEL [--isl 128] [--osl 64] [--concurrency 8] [--requests 32] [--vocab 8000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp

GOOD_TTFT, GOOD_ITL = 1.0, 0.05
"""A request counts as good when its first token comes within the one, and the mean gap is within the other (s)."""


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens; `long_isl`, where given, is that of every fourth prompt."""

    isl: int
    osl: int
    concurrency: int
    requests: int
    long_isl: int = 0
    vocab: int = 8000
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        rng = random.Random(self.seed)
        lengths = [self.long_isl if self.long_isl and i % 4 == 3 else self.isl for i in range(self.requests)]
        return [[rng.randrange(6, self.vocab) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Timing:
    """One request: seconds from its start to each of its pieces."""

    arrivals: list[float]
    tokens: int

    @property
    def ttft(self) -> float:
        return self.arrivals[0]

    @property
    def mean_itl(self) -> float:
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True)
class LoadResult:
    """What a load measured; times in milliseconds."""

    output_tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    goodput: float

    @classmethod
    def of(cls, timings: list[Timing], seconds: float) -> LoadResult:
        ttfts = [timing.ttft for timing in timings]
        gaps = [gap for timing in timings for gap in timing.gaps] or [0.0]
        good = sum(timing.ttft <= GOOD_TTFT and timing.mean_itl <= GOOD_ITL for timing in timings)
        return cls(
            output_tokens_per_second=sum(timing.tokens for timing in timings) / seconds,
            ttft_p50=1e3 * quantile(ttfts, 0.5),
            ttft_p99=1e3 * quantile(ttfts, 0.99),
            itl_p50=1e3 * quantile(gaps, 0.5),
            itl_p99=1e3 * quantile(gaps, 0.99),
            goodput=good / seconds,
        )

    def __str__(self) -> str:
        return (
            f"{self.output_tokens_per_second:7.1f} tok/s  TTFT {self.ttft_p50:6.0f} / {self.ttft_p99:6.0f} ms  "
            f"ITL {self.itl_p50:6.1f} / {self.itl_p99:6.1f} ms  goodput {self.goodput:5.2f} /s"
        )


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def run_load(url: str, model: str, workload: Workload) -> LoadResult:
    """Send all requests, `concurrency` at a time. Raises `RuntimeError` for an answer that is not 200."""
    timings: list[Timing] = []
    prompts = iter(workload.prompts())
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None), connector=connector) as session:

        async def worker(waiting: Iterator[list[int]]) -> None:
            for prompt in waiting:
                timings.append(await _request(session, url, model, prompt, workload.osl))

        started = time.perf_counter()
        await asyncio.gather(*(worker(prompts) for _ in range(workload.concurrency)))
        seconds = time.perf_counter() - started
    return LoadResult.of(timings, seconds)


async def _request(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], osl: int
) -> Timing:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": osl,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    arrivals: list[float] = []
    tokens = 0
    async with session.post(url + "/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                continue
            message = json.loads(line[5:])
            if message.get("choices"):
                arrivals.append(time.perf_counter() - started)
            if message.get("usage"):
                tokens = message["usage"]["completion_tokens"]
    return Timing(arrivals, tokens or len(arrivals))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    defaults = {
        "isl": 128,
        "osl": 64,
        "concurrency": 8,
        "requests": 32,
        "long_isl": 0,
        "vocab": 8000,
        "seed": 0,
    }
    for name, default in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    arguments = vars(parser.parse_args())
    url, model = arguments.pop("url"), arguments.pop("model")
    print(asyncio.run(run_load(url, model, Workload(**arguments))))


if __name__ == "__main__":
    main()
