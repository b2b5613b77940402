"""Overhead of serving: throughput and ITL through the OpenAI API, compared to the engine alone.

The engine runs without a frontend, then behind `neso serve`, with the same checkpoint, prompts and settings; the load
generator is `neso perf`. Prints medians of several rounds, in turns.

usage: python bench/serve_overhead.py [CHECKPOINT] [--concurrency 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path

from checkpoint import write_checkpoint
from load import run_requests
from neso_server import served
from smoke import parse_arguments

from neso.models import SHIPPED_MODELS
from neso.perf.api import EndpointOptions, Measurement, PerfRequest

TOKENS = 64


def prompts(count: int) -> list[PerfRequest]:
    rng = random.Random(0)
    words = "def return class import self for in if not else while try except raise".split()
    return [
        PerfRequest(
            " ".join(rng.choice(words) for _ in range(32)),
            max_tokens=TOKENS,
            extra={"temperature": 0, "ignore_eos": True},
        )
        for _ in range(count)
    ]


def bare(checkpoint: str, concurrency: int, requests: list[PerfRequest]) -> Measurement:
    """Run the requests on an engine in its own process, without a server."""
    options = EndpointOptions(models=(checkpoint,), endpoint_type="engine", streaming=True)
    return run_requests(options, requests, concurrency, warm_up=concurrency)


def over_openai(port: int, concurrency: int, requests: list[PerfRequest]) -> Measurement:
    url = f"127.0.0.1:{port}"
    options = EndpointOptions(models=("bench",), urls=(url,), endpoint_type="completions", streaming=True)
    return run_requests(options, requests, concurrency, warm_up=concurrency)


def round_trip(
    checkpoint: str, concurrency: int, requests: list[PerfRequest]
) -> tuple[Measurement, Measurement]:
    """Measure the engine, then the server, with the same requests."""
    alone = bare(checkpoint, concurrency, requests)
    with served(f"bench={checkpoint}") as server:
        return alone, over_openai(server.ports["openai"], concurrency, requests)


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


def rate_and_itl(run: Measurement) -> tuple[float, float]:
    """Return tokens per second, and the median of the requests' inter-token latencies in milliseconds."""
    summaries = run.summaries
    return summaries["output_token_throughput"].avg, summaries["inter_token_latency"].percentiles[50]


def compare(checkpoint: str, concurrency: int, rounds: int) -> None:
    """Print the medians of both and the medians of their ratios."""
    requests = prompts(max(4, 2 * concurrency))
    pairs = [tuple(map(rate_and_itl, round_trip(checkpoint, concurrency, requests))) for _ in range(rounds)]
    for name, column in (("engine", 0), ("served", 1)):
        rate, itl = (statistics.median(pair[column][i] for pair in pairs) for i in (0, 1))
        print(f"{concurrency:>11} {name:>8} {rate:>9.1f} {itl:>9.2f}")
    rate, itl = (statistics.median(served[i] / engine[i] for engine, served in pairs) for i in (0, 1))
    print(f"{concurrency:>11} {'ratio':>8} {rate:>9.3f} {itl:>9.3f}", flush=True)


if __name__ == "__main__":
    main()
