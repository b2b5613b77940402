"""Closed-loop load on an OpenAI completions endpoint: throughput, TTFT, TPOT, ITL, goodput.

Prompts are random tokens without common prefixes. They are sent as token ids. With --words CHECKPOINT they are sent as
words that are one token each in the checkpoint's byte-level vocabulary, for servers that accept only text.

usage: python bench/load.py [URL] [MODEL] [--isl 128] [--osl 64] [--concurrency 8] [--requests 32] [--long-isl 0]
                            [--vocab 8000] [--seed 0] [--words CHECKPOINT] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from neso_server import served
from smoke import parse_arguments

GOOD_TTFT, GOOD_ITL = 1.0, 0.05
"""Goodput counts requests within these limits of TTFT and mean ITL, in seconds."""


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens; every fourth prompt has `long_isl` tokens, if given."""

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
class Chunk:
    """A chunk of a stream with text: seconds since the start of the request, and number of generated tokens so far."""

    seconds: float
    tokens: int


@dataclass(frozen=True)
class Timing:
    """Chunks of one request. A chunk may have several tokens: servers hold back incomplete characters."""

    chunks: list[Chunk]

    @property
    def tokens(self) -> int:
        return self.chunks[-1].tokens

    @property
    def ttft(self) -> float:
        return self.chunks[0].seconds

    @property
    def tpot(self) -> float:
        """Seconds per token after the first chunk; 0 if there is only one."""
        first, last = self.chunks[0], self.chunks[-1]
        return (last.seconds - first.seconds) / max(1, last.tokens - first.tokens)

    @property
    def gaps(self) -> list[float]:
        """Time gap before each token after the first chunk; a chunk of k tokens has k equal gaps."""
        gaps = []
        for before, piece in pairwise(self.chunks):
            tokens = piece.tokens - before.tokens
            gaps += [(piece.seconds - before.seconds) / tokens] * tokens
        return gaps


@dataclass(frozen=True)
class LoadResult:
    """Results of a load; times in milliseconds."""

    output_tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    itl_p50: float
    itl_p99: float
    goodput: float

    @classmethod
    def of(cls, timings: list[Timing], seconds: float) -> LoadResult:
        ttfts = [timing.ttft for timing in timings]
        gaps = [gap for timing in timings for gap in timing.gaps] or [0.0]
        good = sum(timing.ttft <= GOOD_TTFT and timing.tpot <= GOOD_ITL for timing in timings)
        return cls(
            output_tokens_per_second=sum(timing.tokens for timing in timings) / seconds,
            ttft_p50=1e3 * quantile(ttfts, 0.5),
            ttft_p99=1e3 * quantile(ttfts, 0.99),
            tpot_p50=1e3 * quantile([timing.tpot for timing in timings], 0.5),
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


async def run_load(url: str, model: str, workload: Workload, *, words: list[str] | None = None) -> LoadResult:
    """Send all requests, `concurrency` at a time; with `words`, prompts are text.

    Raises `RuntimeError` for a status other than 200, an error within a stream, and a stream without tokens.
    """
    timings: list[Timing] = []
    prompts = iter(workload.prompts())
    connector = aiohttp.TCPConnector(limit=0)
    # A server that sends no data for this long is considered hung.
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def worker(waiting: Iterator[list[int]]) -> None:
            for ids in waiting:
                prompt = ids if words is None else "".join(words[i % len(words)] for i in ids)
                timings.append(await _request(session, url, model, prompt, workload.osl))

        started = time.perf_counter()
        await asyncio.gather(*(worker(prompts) for _ in range(workload.concurrency)))
        seconds = time.perf_counter() - started
    return LoadResult.of(timings, seconds)


async def _request(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int] | str, osl: int
) -> Timing:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": osl,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    started = time.perf_counter()
    chunks: list[Chunk] = []
    async with session.post(url + "/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                continue
            message = json.loads(line[5:])
            if "error" in message:
                raise RuntimeError(f"{url}: {message['error']}")
            before = chunks[-1].tokens if chunks else 0
            tokens = _tokens_so_far(message, before)
            if tokens > before:
                chunks.append(Chunk(time.perf_counter() - started, tokens))
    if not chunks:
        raise RuntimeError(f"{url}: no token came for a prompt of {len(prompt)}")
    return Timing(chunks)


def _tokens_so_far(message: dict[str, Any], before: int) -> int:
    """Tokens after a chunk with text or a finish reason, else `before`; without usage, one token per chunk."""
    choices = message.get("choices")
    if not choices or not (choices[0]["text"] or choices[0]["finish_reason"]):
        return before
    usage = message.get("usage")
    return int(usage["completion_tokens"]) if usage else before + bool(choices[0]["text"])


def one_token_words(checkpoint: Path) -> list[str]:
    """Words with a leading space that are one token each in a byte-level BPE vocabulary, also when joined."""
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    words = [token[1:] for token in vocabulary if token.startswith("Ġ")]
    return [" " + word for word in words if word.isascii() and word.isalpha()]


@contextmanager
def smoke_server() -> Iterator[str]:
    """Yield the URL of a server with the bundled model."""
    with served() as server:
        yield f"http://127.0.0.1:{server.ports['openai']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:9000")
    parser.add_argument("model", nargs="?", default="neso-pilot")
    defaults = Workload(isl=128, osl=64, concurrency=8, requests=32)
    for name, default in asdict(defaults).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--words", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parse_arguments(parser, isl=16, osl=4, concurrency=2, requests=4, vocab=200)
    workload = Workload(**{name: getattr(arguments, name) for name in asdict(defaults)})
    words = one_token_words(arguments.words) if arguments.words else None
    with smoke_server() if arguments.smoke else nullcontext(arguments.url) as url:
        result = asyncio.run(run_load(url, arguments.model, workload, words=words))
    print(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(result), indent=1))


if __name__ == "__main__":
    main()
