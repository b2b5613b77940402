"""Texts per embeddings request, and passages per re-ranking request: throughput and latency by their number.

One server has the model. Each round runs every number of items once. Throughput is relative to that of single items in
the same round; medians of the rounds are printed. The best number is the smallest within 5 % of the highest throughput.
The model is an encoder or a decoder; all requests of a series have texts of the same length.

usage: python bench/studies/items_per_request.py [MODEL] [--kinds embeddings rankings] [--items 1 2 4 8 16 32 64]
           [--concurrency 1 4] [--tokens 64] [--seconds 3] [--rounds 3] [--plots FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from neso_server import served
from smoke import parse_arguments

from neso.perf.api import EndpointOptions, InputOptions, LoadGenerator, LoadPlan, Measurement, open_source
from neso.perf.report.charts import Chart, Series

KINDS = {
    "embeddings": ("embeddings", "texts", "Embeddings: texts per request"),
    "rankings": ("cohere_rankings", "passages", "Re-ranking: passages per request"),
}
"""Endpoint type, name of the items, and title of the chart."""
NEAR_BEST = 0.95


@dataclass(frozen=True)
class Figures:
    """`rate`: items per second, relative to single items; `latency_ms`: median of a request."""

    rate: float
    latency_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="neso-pilot")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--items", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a text or passage")
    parser.add_argument("--seconds", type=float, default=3, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plots", type=Path, help="folder of the charts")
    arguments = parse_arguments(
        parser, items=[1, 4], concurrency=[2], tokens=16, seconds=0.5, rounds=1, kinds=["rankings"]
    )
    with served(arguments.model) as server:
        url = f"localhost:{server.ports['openai']}"
        for kind in arguments.kinds:
            found = study(kind, url, arguments)
            show(kind, arguments.items, found)
            if arguments.plots:
                plot(kind, arguments, found)


def study(kind: str, url: str, arguments: argparse.Namespace) -> dict[int, list[Figures]]:
    """Return the figures of each number of items, by concurrency."""
    found: dict[int, list[list[Figures]]] = {concurrency: [] for concurrency in arguments.concurrency}
    with ExitStack() as stack:
        generators = [stack.enter_context(generator(kind, url, arguments, n)) for n in arguments.items]
        for _ in range(arguments.rounds):
            for concurrency in arguments.concurrency:
                runs = [run(one, concurrency, arguments.seconds) for one in generators]
                rates = [
                    one.summaries["request_throughput"].avg * items
                    for one, items in zip(runs, arguments.items, strict=True)
                ]
                latencies = [one.summaries["request_latency"].percentiles[50] for one in runs]
                base = rates[0] / arguments.items[0]
                found[concurrency].append(
                    [Figures(rate / base, latency) for rate, latency in zip(rates, latencies, strict=True)]
                )
                print(f"{kind}, {concurrency} in flight: {rates[0]:.1f} items/s", file=sys.stderr, flush=True)
    return {
        concurrency: [
            Figures(
                *(statistics.median(getattr(one, name) for one in column) for name in ("rate", "latency_ms"))
            )
            for column in zip(*rounds, strict=True)
        ]
        for concurrency, rounds in found.items()
    }


def generator(kind: str, url: str, arguments: argparse.Namespace, items: int) -> LoadGenerator:
    endpoint_type = KINDS[kind][0]
    name = arguments.model.rstrip("/").rsplit("/", 1)[-1]
    options = EndpointOptions(models=(name,), urls=(url,), endpoint_type=endpoint_type)
    inputs = InputOptions(
        tokenizer=arguments.model,
        input_tokens_mean=arguments.tokens,
        batch_size_text=items,
        rankings_passages_mean=items,
        rankings_passage_tokens_mean=arguments.tokens,
        rankings_query_tokens_mean=arguments.tokens // 4,
        num_entries=16,
    )
    return LoadGenerator(options, open_source(inputs, endpoint_type, options.models))


def run(generator: LoadGenerator, concurrency: int, seconds: float) -> Measurement:
    """Measure one number of items, after a warm-up. Raises `RuntimeError` if a request fails."""
    plan = LoadPlan(concurrency=concurrency, seconds=seconds)
    measured = Measurement(
        generator.run(plan, warm_up=LoadPlan(concurrency=concurrency, requests=concurrency))
    )
    if measured.errors:
        raise RuntimeError(str(measured.errors))
    return measured


def show(kind: str, numbers: Sequence[int], found: dict[int, list[Figures]]) -> None:
    items = KINDS[kind][1]
    for concurrency, figures in found.items():
        print(f"{kind}, {concurrency} requests in flight")
        print(f"{items:>9} {items + '/s':>11} {'latency ms':>11}")
        for number, one in zip(numbers, figures, strict=True):
            print(f"{number:9} {one.rate:10.2f}x {one.latency_ms:11.1f}")
        most = max(one.rate for one in figures)
        best = next(n for n, one in zip(numbers, figures, strict=True) if one.rate >= NEAR_BEST * most)
        print(f"best: {best} {items} per request, {most:.2f} times the throughput of the first\n", flush=True)


def plot(kind: str, arguments: argparse.Namespace, found: dict[int, list[Figures]]) -> None:
    _, items, title = KINDS[kind]
    numbers = [float(n) for n in arguments.items]
    lines = tuple(
        Series(f"{concurrency} in flight", numbers, [one.rate for one in figures], marks=True)
        for concurrency, figures in found.items()
    )
    label = f"{items}/s, relative to one per request"
    chart = Chart(title, f"{items} per request", label, lines, log_x=True)
    chart.save(arguments.plots / f"study-{kind}.svg")


if __name__ == "__main__":
    main()
