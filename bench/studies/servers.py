"""Neso beside llama.cpp's servers and vLLM: throughput and latency by load and concurrency.

All serve the same checkpoint with bfloat16 weights on all cores through the OpenAI API and get the same prompts as
text. All are started first; then they take turns with each load while the others are idle, so that the figures of a
load are minutes apart. Throughput is relative to Neso's in the same round; medians of the rounds are printed. A server
whose environment is not installed is left out; bench/vs_llamacpp.py and bench/vs_vllm.py install them.

With --limits, Neso's engine runs the same loads alone, without server and clients, and throughput is also printed as a
share of what the machine allows (bench/machine_limits.py): the larger of the bytes of all decode steps / bandwidth and
of all operations / GEMM rate, as if weights and cache were read while the processor computes. Both rates are measured
before each load, because those of a shared machine change.

usage: python bench/studies/servers.py [CHECKPOINT] [--size m] [--loads 128/64 32/256] [--concurrency 1 4 16 64]
           [--rounds 2] [--limits] [--before VENV] [--llamacpp VENV] [--llama-server FILE] [--vllm VENV]
           [--plot FILE.svg]

--loads: input / output tokens. --before: an environment with another version of Neso. --llama-server: llama.cpp's own
server, which generates for several requests at a time (--parallel); llama-cpp-python's generates for one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

from checkpoint import write_checkpoint
from engine_rate import engine_rate
from load import LoadResult, Workload, one_token_words, run_load
from machine_limits import MachineLimits, describe, use_smoke_sizes
from machine_limits import measure as measure_limits
from peer_server import RunningServer, machine, neso, serve
from roofline import Model, Phase
from smoke import parse_arguments

from neso.engine.runners.runner_options import RunnerOptions
from neso.perf.report.charts import Chart, Series

LLAMA_SERVER_PORT = 19300
NESO_BEFORE_PORT = 19301
ENGINE = "engine"
LIMIT = "limit"
BEFORE = " before"
"""Added to the names of another version."""
Start = Callable[[], AbstractContextManager[RunningServer]]


class Load(NamedTuple):
    """A closed loop: `concurrency` requests at a time with `isl` input and `osl` output tokens each."""

    isl: int
    osl: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.isl}/{self.osl}"

    def workload(self, number: int) -> Workload:
        """Prompts of a round; no part of them is in a prefix cache."""
        requests = max(3, 2 * self.concurrency)
        seed = 1000 * number + 100 * self.concurrency + self.isl
        return Workload(self.isl, self.osl, self.concurrency, requests, seed=seed)


@dataclass(frozen=True)
class Figures:
    """Output tokens per second, and medians in milliseconds; NaN for the engine alone."""

    tokens_per_second: float
    ttft: float = float("nan")
    itl: float = float("nan")

    @classmethod
    def of(cls, result: LoadResult) -> Figures:
        return cls(result.output_tokens_per_second, result.ttft_p50, result.itl_p50)


Round = dict[tuple[str, Load], Figures]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--size", choices=["s", "m"], default="m", help="of a new checkpoint")
    parser.add_argument("--loads", nargs="+", default=["128/64"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limits", action="store_true", help="compare to the limits of the machine too")
    parser.add_argument("--before", type=Path, help="environment of another version of Neso")
    parser.add_argument("--llamacpp", type=Path, help="environment of llama-cpp-python")
    parser.add_argument("--llama-server", type=Path, help="program llama-server of llama.cpp")
    parser.add_argument("--vllm", type=Path, help="environment of vLLM")
    parser.add_argument("--plot", type=Path)
    arguments = parse_arguments(
        parser,
        size="s",
        loads=["16/4"],
        concurrency=[2],
        rounds=1,
        limits=True,
        before=None,
        llamacpp=None,
        llama_server=None,
        vllm=None,
    )
    if arguments.smoke:
        use_smoke_sizes()
    loads = [
        Load(*map(int, load.split("/")), concurrency)
        for load in arguments.loads
        for concurrency in arguments.concurrency
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.checkpoint or Path(folder) / arguments.size
        if not model.exists():
            write_checkpoint(model, arguments.size)
        servers = starters(model, arguments, Path(folder), loads)
        engines = {ENGINE: Path(sys.executable)} if arguments.limits else {}
        if arguments.before and engines:
            engines[ENGINE + BEFORE] = arguments.before / "bin" / "python"
        words = one_token_words(model)
        rounds: list[Round] = []
        with ExitStack() as stack:
            running = {name: stack.enter_context(start()) for name, start in servers.items()}
            print(f"{machine()}; {', '.join(servers)}", flush=True)
            for server in running.values():
                measure(server, Workload(*loads[0][:2], 2, 4, seed=999), words)
            for number in range(arguments.rounds):
                found: Round = {}
                for load in loads:
                    if arguments.limits:
                        limits = measure_limits()
                        print(describe(limits), end="", file=sys.stderr)
                        found[LIMIT, load] = Figures(limiting_rate(model, load, limits))
                    for name, python in engines.items():
                        prompts = load.workload(number).prompts()
                        rate = engine_rate(python, model, prompts, load.osl, load.concurrency)
                        found[name, load] = Figures(rate)
                        print(f"{name:13} {load!s:8} {load.concurrency:3} {rate:7.1f} tok/s", file=sys.stderr)
                    for name, server in running.items():
                        result = measure(server, load.workload(number), words)
                        found[name, load] = Figures.of(result)
                        print(f"{name:13} {load!s:8} {load.concurrency:3} {result}", file=sys.stderr)
                rounds.append(found)
    show([*engines, *servers], loads, rounds)
    if arguments.plot:
        plot(list(servers), loads, rounds, arguments.plot)


def starters(model: Path, arguments: argparse.Namespace, folder: Path, loads: list[Load]) -> dict[str, Start]:
    """Return a function for each installed server that starts it with the checkpoint."""
    found: dict[str, Start] = {"Neso": lambda: neso(model)}
    if arguments.before is not None:
        found["Neso" + BEFORE] = lambda: neso(
            model, program=arguments.before / "bin" / "neso", port=NESO_BEFORE_PORT
        )
    if arguments.llamacpp is not None or arguments.llama_server is not None:
        # Lazy: needs the package gguf.
        from gguf import GGMLQuantizationType
        from gguf_checkpoint import write_gguf
        from vs_llamacpp import llamacpp_server

        file = folder / "model.gguf"
        write_gguf(model, file, GGMLQuantizationType.BF16)
        if arguments.llamacpp is not None:
            found["llama.cpp"] = lambda: llamacpp_server(arguments.llamacpp, file)
        if arguments.llama_server is not None:
            found["llama-server"] = lambda: llama_server(arguments.llama_server, file, loads)
    if arguments.vllm is not None:
        from vs_vllm import vllm

        found["vLLM"] = lambda: vllm(arguments.vllm, model)
    return found


def llama_server(program: Path, file: Path, loads: list[Load]) -> AbstractContextManager[RunningServer]:
    """Run llama.cpp's server with a slot for each concurrent request."""
    threads, slots = str(os.cpu_count()), max(load.concurrency for load in loads)
    context = slots * (max(load.isl + load.osl for load in loads) + 16)
    command = [str(program), "--model", str(file), "--port", str(LLAMA_SERVER_PORT), "--alias", "model"]
    command += ["--threads", threads, "--threads-batch", threads]
    command += ["--parallel", str(slots), "--ctx-size", str(context), "--no-webui"]
    return serve("llama-server", command, f"http://127.0.0.1:{LLAMA_SERVER_PORT}", "model", probe="/health")


def measure(server: RunningServer, work: Workload, words: list[str]) -> LoadResult:
    """Run a load. Tokens are sampled, since the likeliest token of random weights may have no text."""
    return run_load(server.url, server.model, work, words=words, temperature=1.0)


def limiting_rate(path: Path, load: Load, limits: MachineLimits) -> float:
    """Return the output tokens per second that the machine allows."""
    prefill = Phase("prefill", load.concurrency, load.isl, 0)
    decode = Phase("decode", load.concurrency, 1, load.isl + load.osl // 2)
    model = Model(path, RunnerOptions(), (prefill, decode))
    steps = load.osl - 1
    seconds = limits.seconds(
        steps * model.read_bytes(decode), model.flops(prefill) + steps * model.flops(decode), model.kind
    )
    return load.concurrency * load.osl / seconds


def show(names: list[str], loads: list[Load], rounds: list[Round]) -> None:
    """Print the medians of all figures, and relative to Neso's of the same round."""
    columns = ("tok/s", "TTFT ms", "ITL ms", "tok/s", "TTFT", "ITL", "of limit")
    head = " ".join(f"{name:>8}" for name in columns)
    print(f"{'':13} {'load':8} {'in flight':>9} {head}   (fourth to sixth: of Neso's)")
    for load in loads:
        for name in names:
            runs = [(one[name, load], one["Neso", load]) for one in rounds]
            fields = ("tokens_per_second", "ttft", "itl")
            own = [statistics.median(getattr(run, field) for run, _ in runs) for field in fields]
            ratios = [
                statistics.median(_ratio(getattr(run, field), getattr(ours, field)) for run, ours in runs)
                for field in fields
            ]
            shares = [
                one[name, load].tokens_per_second / one[LIMIT, load].tokens_per_second
                for one in rounds
                if (LIMIT, load) in one
            ]
            share = f"{100 * statistics.median(shares):6.0f} %" if shares else ""
            values = f"{own[0]:8.1f} {own[1]:8.0f} {own[2]:8.1f} {ratios[0]:8.2f} {ratios[1]:8.2f} {ratios[2]:8.2f}"
            print(f"{name:13} {load!s:8} {load.concurrency:9} {values} {share}")


def plot(names: list[str], loads: list[Load], rounds: list[Round], file: Path) -> None:
    """Draw the throughput of the first load, relative to Neso's at the first concurrency."""
    drawn = [load for load in loads if load[:2] == loads[0][:2]]
    lines = []
    for name in names:
        relative = [
            statistics.median(
                one[name, load].tokens_per_second / one["Neso", drawn[0]].tokens_per_second for one in rounds
            )
            for load in drawn
        ]
        lines.append(Series(name, [float(load.concurrency) for load in drawn], relative, marks=True))
    label = f"tokens/s, relative to Neso with {drawn[0].concurrency} in flight"
    title = f"Throughput of servers: prompts of {drawn[0].isl} tokens, outputs of {drawn[0].osl}"
    Chart(title, "requests in flight", label, tuple(lines)).save(file)


def _ratio(numerator: float, denominator: float) -> float:
    """Return the quotient, NaN if the denominator is 0, as intervals of a short run can be."""
    return numerator / denominator if denominator else float("nan")


if __name__ == "__main__":
    main()
