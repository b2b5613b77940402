"""Infer requests per second and latency, compared to Triton with the same model repository.

    apt-get install wrk nghttp2-client
    python bench/kserve_infer.py [--seconds 3] [--rounds 3] [--connections 1 16 64] [--cases json binary grpc …]

The model is an identity, FP32[16], on the Python backend, with dynamic batching and one instance; `ensemble` sends JSON
through three of them. The `16MB-…` cases send and receive 16 MB over HTTP, gRPC and system shared memory, with at
most four connections. wrk (HTTP) and h2load (gRPC) generate the load with one thread and one request in flight per
connection. The servers take turns within a round. Prints the medians of the rounds, and ratios: Neso's rate divided by
Triton's, and Triton's 50th and 99th percentile of latency divided by Neso's.

`--processes`: Neso runs the models in processes, as Triton does; by default in threads. Triton is the wheel
nvidia-pytriton, installed into a scratch environment, or installed for `--triton PYTHON`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from infer_cases import Case, Load, Ports, make_cases, shared_memory, write_repository
from peer_server import RunningServer, machine, serve
from smoke import parse_arguments, require_command
from triton_server import GRPC_PORT, HTTP_PORT, install, triton

PORTS = {"triton": Ports(HTTP_PORT, GRPC_PORT), "neso": Ports(19000, 19001)}
MAX_LARGE_CONNECTIONS = 4


def neso(repository: Path) -> AbstractContextManager[RunningServer]:
    """Run `neso serve` on a model repository."""
    ports = PORTS["neso"]
    command = [sys.executable, "-m", "neso.cli", "serve", f"--model-repository={repository}"]
    command += [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", "--allow-client-shm=true"]
    command += ["--allow-metrics=false", "--allow-openai=false"]
    return serve("neso", command, f"http://127.0.0.1:{ports.http}", "", probe="/v2/health/ready")


def measure(case: Case, connections: int, servers: list[str], rounds: int, seconds: float) -> dict[str, Load]:
    """Measure the medians of each server."""
    loads: dict[str, list[Load]] = {server: [] for server in servers}
    for server in servers:
        case.run(PORTS[server], connections, 1)
    for _ in range(rounds):
        for server in servers:
            loads[server].append(case.run(PORTS[server], connections, seconds))
    return {
        server: Load(
            statistics.median(load.rate for load in runs),
            statistics.median(load.p50 for load in runs),
            statistics.median(load.p99 for load in runs),
        )
        for server, runs in loads.items()
    }


def show(name: str, connections: int, loads: dict[str, Load]) -> None:
    """Print one line of the report."""
    line = f"{name:9} {connections:5}"
    for load in loads.values():
        line += f"   {load.rate:8,.0f} {load.p50:7.2f} {load.p99:7.2f}"
    if len(loads) == 2:
        other, ours = loads.values()
        ratios = (ours.rate / other.rate, other.p50 / ours.p50, other.p99 / ours.p99)
        line += "   " + " ".join(f"{ratio:5.2f}x" for ratio in ratios)
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64])
    cases = make_cases()
    parser.add_argument("--cases", nargs="+", default=list(cases), choices=list(cases))
    parser.add_argument("--processes", action="store_true", help="Python models of Neso in processes")
    parser.add_argument("--triton", type=Path, help="interpreter of an environment with the wheel")
    parser.add_argument("--only", action="store_true", help="measure Neso alone")
    options = parse_arguments(parser, seconds=1, rounds=1, connections=[1], cases=["json"], only=True)
    require_command("wrk", "wrk")
    servers = ["neso"] if options.only else ["triton", "neso"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_repository(folder / "threads")
        write_repository(folder / "processes", processes=True)
        stack.enter_context(neso(folder / ("processes" if options.processes else "threads")))
        if not options.only:
            stack.enter_context(triton(options.triton or install(), folder / "threads"))
        stack.enter_context(shared_memory([PORTS[server] for server in servers]))
        print(f"{machine()}, Python models of Neso in {'processes' if options.processes else 'threads'}")
        titles = "".join(f"   {server + '/s':>8}  p50 ms  p99 ms" for server in servers)
        print(f"case      conns{titles}" + ("" if options.only else "     rate    p50    p99"))
        for name in options.cases:
            counts = options.connections
            if name.startswith("16MB"):
                counts = sorted({min(count, MAX_LARGE_CONNECTIONS) for count in counts})
            for connections in counts:
                loads = measure(cases[name], connections, servers, options.rounds, options.seconds)
                show(name, connections, loads)


if __name__ == "__main__":
    main()
