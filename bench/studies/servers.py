"""Neso beside llama.cpp's server (llama-cpp-python) and vLLM: throughput and latency by concurrency.

All serve the same checkpoint with bfloat16 weights on all cores through the OpenAI API, one server at a time, and get
the same prompts as text. Throughput is relative to Neso's in the same round; medians of the rounds are printed. A
server whose environment is not installed is left out; bench/vs_llamacpp.py and bench/vs_vllm.py install them.

usage: python bench/studies/servers.py [CHECKPOINT] [--size m] [--concurrency 1 2 4 8 16] [--isl 128] [--osl 64]
           [--rounds 2] [--llamacpp VENV] [--vllm VENV] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from checkpoint import write_checkpoint
from load import LoadResult, Workload, one_token_words, run_load
from peer_server import RunningServer, machine, neso
from smoke import parse_arguments

from neso.perf.report.charts import Chart, Series

Start = Callable[[], AbstractContextManager[RunningServer]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--size", choices=["s", "m"], default="m", help="of a new checkpoint")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--isl", type=int, default=128)
    parser.add_argument("--osl", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--llamacpp", type=Path, help="environment of llama-cpp-python")
    parser.add_argument("--vllm", type=Path, help="environment of vLLM")
    parser.add_argument("--plot", type=Path)
    arguments = parse_arguments(
        parser, size="s", concurrency=[2], isl=16, osl=4, rounds=1, llamacpp=None, vllm=None
    )
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.checkpoint or Path(folder) / arguments.size
        if not model.exists():
            write_checkpoint(model, arguments.size)
        servers = starters(model, arguments, Path(folder))
        words = one_token_words(model)
        print(f"{machine()}; {', '.join(servers)}", flush=True)
        rounds = []
        for number in range(arguments.rounds):
            rounds.append({name: measure(start, arguments, words, number) for name, start in servers.items()})
    show(list(servers), arguments, rounds)


def starters(model: Path, arguments: argparse.Namespace, folder: Path) -> dict[str, Start]:
    """Return a function for each installed server that starts it with the checkpoint."""
    found: dict[str, Start] = {"Neso": lambda: neso(model)}
    if arguments.llamacpp is not None:
        # Lazy: needs the package gguf.
        from gguf import GGMLQuantizationType
        from gguf_checkpoint import write_gguf
        from vs_llamacpp import llamacpp_server

        file = folder / "model.gguf"
        write_gguf(model, file, GGMLQuantizationType.BF16)
        found["llama.cpp"] = lambda: llamacpp_server(arguments.llamacpp, file)
    if arguments.vllm is not None:
        from vs_vllm import vllm

        found["vLLM"] = lambda: vllm(arguments.vllm, model)
    return found


def load(server: RunningServer, work: Workload, words: list[str]) -> LoadResult:
    """Run a load with sampled tokens: the likeliest token of random weights may have no text."""
    return run_load(server.url, server.model, work, words=words, temperature=1.0)


def measure(start: Start, arguments: argparse.Namespace, words: list[str], seed: int) -> list[LoadResult]:
    """Start a server and run each concurrency, after a warm-up."""
    results = []
    with start() as server:
        load(server, Workload(arguments.isl, arguments.osl, 2, 4, seed=999), words)
        for concurrency in arguments.concurrency:
            requests = max(3, 2 * concurrency)
            # Other prompts in each run: no part of them is in a prefix cache.
            work = Workload(
                arguments.isl, arguments.osl, concurrency, requests, seed=1000 * seed + concurrency
            )
            results.append(load(server, work, words))
            print(f"{server.name:8} {concurrency:3} {results[-1]}", file=sys.stderr, flush=True)
    return results


def show(names: list[str], arguments: argparse.Namespace, rounds: list[dict[str, list[LoadResult]]]) -> None:
    """Print the medians of all figures, relative to Neso's of the same round, and draw the throughput."""
    head = " ".join(f"{name:>8}" for name in ("tok/s", "TTFT ms", "ITL ms", "tok/s", "TTFT", "ITL"))
    print(f"{'':10} {'in flight':>9} {head}   (the last three: of Neso's)")
    fields = ("output_tokens_per_second", "ttft_p50", "itl_p50")
    lines = []
    for name in names:
        relative = []
        for position, concurrency in enumerate(arguments.concurrency):
            runs = [(one[name][position], one["Neso"][position], one["Neso"][0]) for one in rounds]
            own = [statistics.median(getattr(run, field) for run, _, _ in runs) for field in fields]
            ratios = [
                statistics.median(_ratio(getattr(run, field), getattr(ours, field)) for run, ours, _ in runs)
                for field in fields
            ]
            relative.append(
                statistics.median(
                    run.output_tokens_per_second / first.output_tokens_per_second for run, _, first in runs
                )
            )
            values = f"{own[0]:8.1f} {own[1]:8.0f} {own[2]:8.1f} {ratios[0]:8.2f} {ratios[1]:8.2f} {ratios[2]:8.2f}"
            print(f"{name:10} {concurrency:9} {values}")
        lines.append(Series(name, [float(n) for n in arguments.concurrency], relative, marks=True))
    if arguments.plot:
        first = arguments.concurrency[0]
        label = f"tokens/s, relative to Neso with {first} in flight"
        title = f"Throughput of servers: prompts of {arguments.isl} tokens, outputs of {arguments.osl}"
        Chart(title, "requests in flight", label, tuple(lines)).save(arguments.plot)


def _ratio(numerator: float, denominator: float) -> float:
    """Return the quotient, NaN if the denominator is 0, as intervals of a short run can be."""
    return numerator / denominator if denominator else float("nan")


if __name__ == "__main__":
    main()
