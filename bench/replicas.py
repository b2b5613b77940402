"""One engine against two engines of the same model, and the choice of the engine by its prefix cache.

- tokens per second of one engine with two threads and of two engines with one thread each, behind one name: the same
  checkpoint and the same load, in turns. The ratio is two engines divided by one engine.
- two engines, Neso's choice of the engine against round robin, the same requests in turns. The KV cache of an engine
  has room for five eighths of the prefixes, so both caches together have room for all. The ratio is the TTFT of round
  robin divided by that of Neso's choice, in the same round.
    prefixes       each prompt has one of the prefixes and 32 tokens of its own
    conversations  as many conversations as prefixes, of four turns; a turn adds a quarter of a prefix
    nothing        prompts of 32 to 512 tokens without a common prefix
- the same with two worker processes that pull requests from the queue of this process, as those of `neso serve
  --workers 2` do

usage: python bench/replicas.py [--parts throughput engines workers] [--model s] [--rounds 3] [--requests 96]
           [--prefixes 8] [--prefix 512] [--cases prefixes conversations nothing]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from checkpoint import SHAPES, write_checkpoint
from load import Workload, run_load
from neso_server import served
from smoke import parse_arguments

from neso.cluster import Choice, ClusterEngine, Job, Router, WorkerState
from neso.engine.client.engine_group import EngineGroup
from neso.engine.client.engine_load import EngineLoad, GroupRequest, LeastCost
from neso.engine.config import EngineConfig
from neso.generation import GenerationRequest, SamplingParams

PARTS = ("throughput", "engines", "workers")
CASES = ("prefixes", "conversations", "nothing")
ChooseEngine = Callable[[GroupRequest, Sequence[EngineLoad]], EngineLoad]
CONCURRENCY = 8
BLOCK = 16
"""Tokens of a block of the KV cache."""
SUFFIX, OUTPUT = 32, 8
"""Tokens of a request with a shared prefix."""
TURNS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--model", default="s", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=96, help="requests of a round")
    parser.add_argument("--prefixes", type=int, default=8, help="number of different prefixes")
    parser.add_argument("--prefix", type=int, default=512, help="tokens of a prefix")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="kinds of prompts")
    options = parse_arguments(
        parser, model="tiny", rounds=1, requests=8, prefixes=2, prefix=128, cases=["prefixes"]
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_checkpoint(checkpoint, options.model)
        vocabulary = SHAPES[options.model]["vocab"]
        if "throughput" in options.parts:
            compare_throughput(checkpoint, vocabulary, options.rounds, options.requests)
        for part in OPEN:
            if part in options.parts:
                asyncio.run(compare_choices(checkpoint, vocabulary, options, part))


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


def round_robin() -> ChooseEngine:
    """Return a function that chooses the engines with room one after another."""
    turns = itertools.count()
    return lambda _, engines: engines[next(turns) % len(engines)]


class RoundRobinRouter(Router):
    """The oldest request goes to the next worker in turn that has room."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def choose(self, window: Sequence[Job], workers: Sequence[WorkerState], now: float) -> Choice:
        for job in window[:1]:
            for offset in range(len(workers)):
                worker = workers[(self._turn + offset) % len(workers)]
                if worker.has_room(job):
                    self._turn += offset + 1
                    return Choice(job, worker)
        return Choice()


async def open_group(config: EngineConfig, in_turn: bool) -> EngineGroup:
    group = await EngineGroup.start(config, 2)
    group.choose = round_robin() if in_turn else LeastCost()
    return group


async def open_workers(config: EngineConfig, in_turn: bool) -> ClusterEngine:
    cluster = msgspec.structs.replace(config.cluster, workers=2)
    engine = await ClusterEngine.open(msgspec.structs.replace(config, cluster=cluster))
    if in_turn:
        engine.cluster.router = RoundRobinRouter()
    return engine


OPEN: dict[str, Callable[[EngineConfig, bool], Awaitable[EngineGroup | ClusterEngine]]] = {
    "engines": open_group,
    "workers": open_workers,
}
"""Functions that start two engines. The second argument: whether they get requests in turn."""


@dataclass(slots=True)
class Conversation:
    """The tokens so far, and the tokens that the user adds in each of the next turns."""

    context: list[int]
    turns: list[list[int]]


def workloads(requests: int, prefixes: int, prefix: int, vocabulary: int) -> dict[str, list[Conversation]]:
    rng = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(6, vocabulary) for _ in range(number)]

    beginnings = [tokens(prefix) for _ in range(prefixes)]
    shared = [Conversation(beginnings[i % prefixes], [tokens(SUFFIX)]) for i in range(requests)]
    rng.shuffle(shared)
    turn = prefix // TURNS - OUTPUT
    conversations = [
        Conversation([], [tokens(turn) for _ in range(TURNS)]) for _ in range(max(requests // TURNS, 1))
    ]
    lengths = [SUFFIX, prefix // 8, prefix // 2, prefix]
    alone = [Conversation([], [tokens(rng.choice(lengths))]) for _ in range(requests)]
    return {"prefixes": shared, "conversations": conversations, "nothing": alone}


async def compare_choices(checkpoint: Path, vocabulary: int, options: argparse.Namespace, what: str) -> None:
    """Print hit rate and TTFT of both choices; each measurement starts with empty caches."""
    slots = CONCURRENCY // 2
    num_tokens = options.prefixes * options.prefix * 5 // 8 + slots * (SUFFIX + OUTPUT + BLOCK)
    max_model_len = options.prefix + SUFFIX + OUTPUT
    config = EngineConfig.from_options(
        str(checkpoint),
        {
            "num_threads": 1,
            "max_num_seqs": slots,
            "block_size": BLOCK,
            "num_blocks": -(-max(num_tokens, max_model_len) // BLOCK),
            "max_model_len": max_model_len,
        },
    )
    print(
        f"\n{what:14} {'hits: round robin':>18} {'Neso':>6} {'TTFT ms: round robin':>21} {'Neso':>7} {'ratio':>6}"
    )
    work_of = workloads(options.requests, options.prefixes, options.prefix, vocabulary)
    for case in options.cases:
        work = work_of[case]
        found: list[list[tuple[float, float]]] = [[], []]
        for number in range(options.rounds):
            for i in (0, 1) if number % 2 == 0 else (1, 0):
                engine = await OPEN[what](config, not i)
                found[i].append(await measure(engine, work, options.prefixes))
        columns = [[statistics.median(column) for column in zip(*results, strict=True)] for results in found]
        (base_hits, base_ttft), (hits, ttft) = columns
        ratio = statistics.median(base[1] / own[1] for base, own in zip(*found, strict=True))
        print(
            f"{case:14} {base_hits:18.1%} {hits:6.1%} {base_ttft * 1e3:21.1f} {ttft * 1e3:7.1f} {ratio:6.2f}",
            flush=True,
        )


async def measure(
    engine: EngineGroup | ClusterEngine, work: list[Conversation], most_open: int
) -> tuple[float, float]:
    """Return the share of the prompt tokens found in prefix caches, and the mean seconds to the first token.

    `most_open`: number of conversations that take turns; the next one begins when one has ended.
    """
    waiting = deque(Conversation(list(c.context), list(c.turns)) for c in work)
    current = deque(waiting.popleft() for _ in range(min(most_open, len(waiting))))
    times = []

    async def client() -> None:
        while current:
            conversation = current.popleft()
            conversation.context += conversation.turns.pop(0)
            started, first = time.perf_counter(), 0.0
            params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
            async for output in engine.generate(GenerationRequest(list(conversation.context), params)):
                first = first or time.perf_counter() - started
                for delta in output.deltas:
                    conversation.context += delta.token_ids
            times.append(first)
            if conversation.turns:
                current.append(conversation)
            elif waiting:
                current.append(waiting.popleft())

    try:
        # As many clients as slots of one engine: each engine always has a free slot.
        await asyncio.gather(*(client() for _ in range(CONCURRENCY // 2)))
        stats = await engine.check_integrity()
    finally:
        await engine.stop()
    return stats.prefix_hit_tokens / stats.prefix_queried_tokens, statistics.mean(times)


if __name__ == "__main__":
    main()
