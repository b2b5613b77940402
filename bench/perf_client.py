"""Cost and speed of load generators on the same server: neso perf, perf_analyzer and aiperf.

    bench/install_perf_tools.sh FOLDER perf_analyzer aiperf
    python bench/perf_client.py --tools FOLDER [--requests 20000] [--concurrency 32] [--rounds 3] [--interval-ms 0]

The server is bench/stub_server.py; each response streams 16 tokens. The tools run one after the other in each round.
Prints medians: requests per second, CPU time of the tool per request and per token event, its mean TTFT, and the CPU
time of the server per request, whose inverse is the rate that one server process can reach. The CPU time of a tool is
the difference of two runs of different length, which excludes its start. On a busy machine it is the most stable
figure. With --url and --model, the tools measure another server.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path

import psutil
from smoke import parse_arguments

TOKENS = 16
TOKENIZER = Path(__file__).parents[1] / "neso" / "models" / "neso-pilot"
STUB = Path(__file__).with_name("stub_server.py")


@dataclass(frozen=True)
class Figures:
    """Results of one run.

    `cpu_us`: CPU time of the tool per request, without its start; NaN if the start varied by more than that.
    `server_us`: CPU time of the server per request, NaN for a server of --url.
    """

    requests_per_second: float
    cpu_us: float
    ttft_ms: float
    server_us: float


@dataclass(frozen=True)
class Load:
    url: str
    model: str
    concurrency: int
    folder: Path
    server: psutil.Process | None


Tool = Callable[[Load, int], tuple[float, float]]
"""Sends a number of requests; returns requests per second and mean TTFT in ms."""


def neso_perf(load: Load, requests: int) -> tuple[float, float]:
    folder = load.folder / f"neso{requests}"
    command = [
        sys.executable, "-m", "neso.cli", "perf", "profile", "-m", load.model, "-u", load.url, "--streaming",
        "--concurrency", str(load.concurrency), "--request-count", str(requests), "--isl", "50", "--osl", str(TOKENS),
        "--tokenizer", str(TOKENIZER), "--artifact-dir", str(folder), "--ui", "none", "--no-report",
        "--no-server-metrics", "--no-telemetry",
    ]  # fmt: skip
    _run(command)
    [export] = folder.rglob("profile_export_genai_perf.json")
    figures = json.loads(export.read_text())
    return figures["request_throughput"]["avg"], figures["time_to_first_token"]["avg"]


def perf_analyzer(binary: Path) -> Tool:
    def run(load: Load, requests: int) -> tuple[float, float]:
        inputs, export = load.folder / "inputs.json", load.folder / f"export{requests}.json"
        message = {"role": "user", "content": "word " * 50}
        body = {"model": load.model, "messages": [message], "stream": True, "max_tokens": TOKENS}
        inputs.write_text(json.dumps({"data": [{"payload": [body]}]}))
        _run([
            str(binary), "-m", load.model, "--service-kind", "openai", "--endpoint", "v1/chat/completions",
            "-u", load.url, "-i", "http", "--input-data", str(inputs), "--async",
            "--concurrency-range", str(load.concurrency), "--request-count", str(requests),
            "--profile-export-file", str(export),
        ])  # fmt: skip
        done = json.loads(export.read_text())["experiments"][0]["requests"]
        seconds = (
            max(one["response_timestamps"][-1] for one in done) - min(one["timestamp"] for one in done)
        ) / 1e9
        ttft = statistics.fmean(one["response_timestamps"][0] - one["timestamp"] for one in done) / 1e6
        return len(done) / seconds, ttft

    return run


def aiperf(binary: Path) -> Tool:
    def run(load: Load, requests: int) -> tuple[float, float]:
        folder = load.folder / f"aiperf{requests}"
        _run([
            str(binary), "profile", "-m", load.model, "--url", f"http://{load.url}", "--endpoint-type", "chat",
            "--streaming", "--tokenizer", str(TOKENIZER), "--concurrency", str(load.concurrency),
            "--request-count", str(requests), "--isl", "50", "--osl", str(TOKENS), "--ui", "none",
            "--artifact-dir", str(folder),
        ])  # fmt: skip
        figures = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
        figures = figures.get("records", figures)
        return figures["request_throughput"]["avg"], figures["time_to_first_token"]["avg"]

    return run


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stderr[:1000]}\n{done.stdout[-1000:]}")


def measure(tool: Tool, load: Load, requests: int) -> Figures:
    """Run a tool twice, with a tenth of the requests and with all."""
    cpu = []
    for number in (requests // 10, requests):
        before, server_before = _children_cpu(), _server_cpu(load)
        rate, ttft = tool(load, number)
        cpu.append(_children_cpu() - before)
        server = _server_cpu(load) - server_before
    difference = cpu[1] - cpu[0] if cpu[1] > cpu[0] else math.nan
    return Figures(rate, difference / (requests - requests // 10) * 1e6, ttft, server / requests * 1e6)


def _server_cpu(load: Load) -> float:
    if load.server is None:
        return math.nan
    times = load.server.cpu_times()
    return float(times.user + times.system)


def _children_cpu() -> float:
    """CPU time of all processes that ended, with their own children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def stub_server(interval_ms: float) -> Iterator[tuple[str, psutil.Process | None]]:
    """Yield HOST:PORT of the server, and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        str(STUB),
        str(port),
        "--tokens",
        str(TOKENS),
        "--interval-ms",
        str(interval_ms),
    ]
    process = subprocess.Popen(command)
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", type=Path, help="folder of bench/install_perf_tools.sh")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--interval-ms", type=float, default=0.0, help="time between two tokens of the server"
    )
    parser.add_argument(
        "--url", default="", help="HOST:PORT of another server, to compare the tools' figures"
    )
    parser.add_argument("--model", default="stub")
    arguments = parse_arguments(parser, requests=2000, concurrency=4, rounds=1)
    tools: dict[str, Tool] = {"neso perf": neso_perf}
    if arguments.tools:
        found = {"perf_analyzer": (perf_analyzer, "bin/perf_analyzer"), "aiperf": (aiperf, "bin/aiperf")}
        tools |= {
            name: make((arguments.tools / path).resolve())
            for name, (make, path) in found.items()
            if (arguments.tools / path).exists()
        }
    figures: dict[str, list[Figures]] = {name: [] for name in tools}
    for number in range(arguments.rounds):
        for name, tool in tools.items():
            given = nullcontext((arguments.url, None))
            server = given if arguments.url else stub_server(arguments.interval_ms)
            with server as (url, process), tempfile.TemporaryDirectory() as folder:
                load = Load(url, arguments.model, arguments.concurrency, Path(folder), process)
                figures[name].append(measure(tool, load, arguments.requests))
                print(f"round {number + 1}: {name}: {figures[name][-1]}", file=sys.stderr)
    print(
        f"{'':14} {'req/s':>8} {'ratio':>7} {'CPU us/request':>15} {'us/event':>9} {'ratio':>7} {'TTFT ms':>8}"
        f" {'server us':>10}"
    )
    base = figures["neso perf"]
    for name, runs in figures.items():
        rate, cpu, ttft, server_us = (
            statistics.median(getattr(run, field.name) for run in runs) for field in fields(Figures)
        )
        rate_ratio = statistics.median(
            a.requests_per_second / b.requests_per_second for a, b in zip(base, runs, strict=True)
        )
        cpu_ratio = statistics.median(b.cpu_us / a.cpu_us for a, b in zip(base, runs, strict=True))
        print(
            f"{name:14} {rate:8,.0f} {rate_ratio:6.2f}x {cpu:15.1f} {cpu / TOKENS:9.2f} {cpu_ratio:6.2f}x {ttft:8.2f}"
            f" {server_us:10.1f}"
        )


if __name__ == "__main__":
    main()
