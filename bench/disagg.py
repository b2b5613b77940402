"""Prefill and decode apart against both together: tokens of running requests while long prompts arrive.

Three servers of the same checkpoint on the same cores take turns: one engine with all threads, which computes long
prompts in chunks beside its decode steps; two workers that do both; a prefill worker and a decode worker. In a closed
loop, most requests have a short prompt and a long output, the others a long prompt and one token. The time between two
tokens (ITL) is that of the former, TTFT that of the latter. The ratio is the 99th percentile of ITL of one engine
divided by that of the server in the row, median of the rounds.

usage: python bench/disagg.py [--model s] [--rounds 3] [--requests 48] [--long 1024]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from checkpoint import SHAPES, write_checkpoint
from load import run_requests
from neso_server import served
from smoke import parse_arguments

from neso.perf.endpoints.options import EndpointOptions
from neso.perf.requests import PerfRequest

SERVERS = {
    "one engine": (),
    "2 workers": ("--workers", "2"),
    "1 prefill, 1 decode": ("--prefill-workers", "1", "--decode-workers", "1"),
}
SHORT = 32
"""Tokens of a short prompt."""
OUTPUT = 128
"""Tokens that follow a short prompt."""
LONG_EVERY = 3
"""Every third request has a long prompt."""
CONCURRENCY = 6


@dataclass(frozen=True)
class Result:
    """Times in milliseconds."""

    itl_p50: float
    itl_p99: float
    long_ttft_p50: float
    tokens_per_second: float


def requests(count: int, long: int, vocabulary: int, seed: int) -> list[PerfRequest]:
    """Return requests without common prefixes."""
    rng = random.Random(seed)

    def request(number: int) -> PerfRequest:
        is_long = number % LONG_EVERY == LONG_EVERY - 1
        return PerfRequest(
            token_ids=[rng.randrange(6, vocabulary) for _ in range(long if is_long else SHORT)],
            max_tokens=1 if is_long else OUTPUT,
            extra={"temperature": 0.0, "ignore_eos": True},
        )

    return [request(number) for number in range(count)]


def measure(checkpoint: Path, server: tuple[str, ...], count: int, long: int, vocabulary: int) -> Result:
    """Start a server and run the load on it."""
    with served(f"model={checkpoint}", *server) as process:
        options = EndpointOptions(
            models=("model",),
            urls=(f"http://127.0.0.1:{process.ports['openai']}",),
            endpoint_type="completions",
            streaming=True,
            request_timeout=600.0,
        )
        run_requests(options, requests(CONCURRENCY, long, vocabulary, seed=1), CONCURRENCY)
        measured = run_requests(options, requests(count, long, vocabulary, seed=2), CONCURRENCY)
    is_long = measured.records.columns["index"] % LONG_EVERY == LONG_EVERY - 1
    itl = measured.summaries["pooled_inter_token_latency"]
    return Result(
        itl_p50=itl.percentiles[50],
        itl_p99=itl.percentiles[99],
        long_ttft_p50=float(np.median(measured.values["time_to_first_token"][is_long])),
        tokens_per_second=measured.summaries["output_token_throughput"].avg,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--long", type=int, default=1024, help="tokens of a long prompt")
    arguments = parse_arguments(parser, model="tiny", rounds=1, requests=6, long=300)
    results: dict[str, list[Result]] = {name: [] for name in SERVERS}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), arguments.model)
        vocabulary = SHAPES[arguments.model]["vocab"]
        for _ in range(arguments.rounds):
            for name, server in SERVERS.items():
                found = measure(Path(folder), server, arguments.requests, arguments.long, vocabulary)
                results[name].append(found)
    print(f"{'':<21}{'ITL p50':>9}{'ITL p99':>9}{'TTFT of long':>14}{'tokens/s':>10}{'ratio':>7}")
    baseline = results["one engine"]
    for name, runs in results.items():
        columns = [
            statistics.median(getattr(run, column) for run in runs)
            for column in ("itl_p50", "itl_p99", "long_ttft_p50", "tokens_per_second")
        ]
        ratio = statistics.median(
            own.itl_p99 and base.itl_p99 / own.itl_p99 for base, own in zip(baseline, runs, strict=True)
        )
        print(f"{name:<21}" + "{:9.1f}{:9.1f}{:14.1f}{:10.1f}".format(*columns) + f"{ratio:7.2f}")


if __name__ == "__main__":
    main()
