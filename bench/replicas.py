"""One engine against two engines of the same model, and the choice of the engine by its prefix cache.

- tokens per second of one engine with two threads and of two engines with one thread each, behind one name: the same
  checkpoint and the same load, in turns. The ratio is two engines divided by one engine.
- two engines, requests that share prefixes: Neso's choice of the engine against round robin. An engine has room for
  five eighths of the prefixes in its KV cache. The ratio is the TTFT of round robin divided by that of Neso's choice.

usage: python bench/replicas.py [--model s] [--rounds 3] [--requests 32] [--prefixes 8] [--prefix 512]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpoint import SHAPES, write_checkpoint
from load import Workload, run_load
from neso_server import served
from smoke import parse_arguments

from neso.engine.client.engine_group import EngineGroup
from neso.engine.client.engine_load import EngineLoad, GroupRequest, cheapest
from neso.engine.config import EngineConfig
from neso.generation import GenerationRequest, SamplingParams

Choice = Callable[[GroupRequest, Sequence[EngineLoad]], EngineLoad]
CONCURRENCY = 8
BLOCK = 16
"""Tokens of a block of the KV cache."""
SUFFIX, OUTPUT = 32, 8
"""Tokens of a request with a shared prefix."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="s", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32, help="requests of a round")
    parser.add_argument("--prefixes", type=int, default=8, help="number of different prefixes")
    parser.add_argument("--prefix", type=int, default=512, help="tokens of a prefix")
    options = parse_arguments(parser, model="tiny", rounds=1, requests=8, prefixes=2, prefix=128)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_checkpoint(checkpoint, options.model)
        vocabulary = SHAPES[options.model]["vocab"]
        compare_throughput(checkpoint, vocabulary, options.rounds, options.requests)
        prompts = shared_prompts(options.requests, options.prefixes, options.prefix, vocabulary)
        asyncio.run(compare_choices(checkpoint, prompts, options.prefixes * options.prefix, options.rounds))


def compare_throughput(checkpoint: Path, vocabulary: int, rounds: int, requests: int) -> None:
    """Print tokens per second of one engine with two threads and of two engines with one thread."""
    lengths = {"decode": (32, 64), "prefill": (256, 2)}
    with (
        served(str(checkpoint), "--num-threads=2") as one,
        served(str(checkpoint), "--num-threads=1", "--data-parallel-size=2") as two,
    ):
        print(f"{'case':8} {'prompt':>7} {'output':>7} {'1 engine':>9} {'2 engines':>10} {'ratio':>6}")
        for case, (prompt, output) in lengths.items():
            rates: list[list[float]] = [[], []]
            for seed in range(rounds + 1):  # the first round warms up
                work = Workload(prompt, output, CONCURRENCY, requests, vocab=vocabulary, seed=seed)
                for server, found in zip((one, two), rates, strict=True):
                    url = f"http://127.0.0.1:{server.ports['openai']}"
                    found.append(run_load(url, checkpoint.name, work).output_tokens_per_second)
            pairs = list(zip(*rates, strict=True))[1:]
            first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(second / first for first, second in pairs)
            print(f"{case:8} {prompt:7} {output:7} {first:9.1f} {second:10.1f} {ratio:6.2f}", flush=True)


def round_robin() -> Choice:
    """Return a function that chooses the engines with room one after another."""
    turns = itertools.count()
    return lambda _, engines: engines[next(turns) % len(engines)]


def shared_prompts(count: int, prefixes: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return prompts, each of one of the prefixes and its own suffix, in random order."""
    rng = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(6, vocabulary) for _ in range(number)]

    beginnings = [tokens(length) for _ in range(prefixes)]
    prompts = [beginnings[i % prefixes] + tokens(SUFFIX) for i in range(count)]
    rng.shuffle(prompts)
    return prompts


async def compare_choices(
    checkpoint: Path, prompts: list[list[int]], prefix_tokens: int, rounds: int
) -> None:
    """Print hit rate and TTFT of both choices; each round starts with empty caches."""
    slots = CONCURRENCY // 2
    num_tokens = max(prefix_tokens * 5 // 8, len(prompts[0])) + slots * (SUFFIX + OUTPUT + BLOCK)
    config = EngineConfig.from_options(
        str(checkpoint),
        {
            "num_threads": 1,
            "max_num_seqs": slots,
            "block_size": BLOCK,
            "num_blocks": -(-num_tokens // BLOCK),
            "max_model_len": len(prompts[0]) + OUTPUT,
        },
    )
    found: dict[str, list[tuple[float, float]]] = {"round robin": [], "least work": []}
    for _ in range(rounds):
        for name, results in found.items():
            results.append(
                await measure(config, prompts, round_robin() if name == "round robin" else cheapest)
            )
    print(f"\n{'choice':12} {'prefix hits':>12} {'mean TTFT ms':>13}")
    for name, results in found.items():
        hits, seconds = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"{name:12} {hits:12.1%} {seconds * 1e3:13.1f}")
    pairs = zip(found["round robin"], found["least work"], strict=True)
    print(f"TTFT ratio {statistics.median(base[1] / own[1] for base, own in pairs):.2f}")


async def measure(config: EngineConfig, prompts: list[list[int]], choose: Choice) -> tuple[float, float]:
    """Return the share of the prompt tokens found in prefix caches, and the mean seconds to the first token."""
    group = await EngineGroup.start(config, 2)
    group.choose = choose
    waiting, times = iter(prompts), []

    async def client() -> None:
        for prompt in waiting:
            started, first = time.perf_counter(), 0.0
            params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
            async for _ in group.generate(GenerationRequest(prompt, params)):
                first = first or time.perf_counter() - started
            times.append(first)

    try:
        # As many clients as slots of one engine: each engine always has a free slot.
        await asyncio.gather(*(client() for _ in range(CONCURRENCY // 2)))
        stats = await group.check_integrity()
    finally:
        await group.stop()
    return stats.prefix_hit_tokens / stats.prefix_queried_tokens, statistics.mean(times)


if __name__ == "__main__":
    main()
