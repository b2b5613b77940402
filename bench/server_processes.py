"""Cost of requests with one and with several server processes: CPU time of each process, and the rate it allows.

    apt-get install wrk nghttp2-client
    python bench/server_processes.py [--processes 1 2] [--rounds 3] [--seconds 4] [--connections 64] [--cases stream]

Cases: `json`, `grpc`: small requests to a Python model. `stream`: streamed completions of the bundled model, per token.
The servers run in turns, in one run. Prints microseconds of CPU time per request or token: `busiest` is the server
process that has the most, `server` all server processes, `others` engines and processes of models, `load` the load
generator. `bound/s` is the rate at which the busiest server process is always busy, which a machine with a core for
each process can reach; `rate/s` was reached here. The last lines are the ratios to the first number of processes.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
from infer_cases import Ports, make_cases, write_repository
from neso_server import NesoServer, served
from smoke import parse_arguments, require_command

from neso.models import SHIPPED_MODELS

MODEL = "neso-pilot"


@dataclass(frozen=True)
class Cost:
    """CPU time in µs per request or token, and requests or tokens per second."""

    busiest: float
    server: float
    others: float
    load: float
    rate: float

    @property
    def bound(self) -> float:
        """Rate at which the busiest server process is always busy."""
        return 1e6 / self.busiest


def cpu_seconds(server: NesoServer) -> tuple[dict[int, float], float]:
    """Return the CPU time of the server processes by pid, and of all other processes of the server."""
    main = psutil.Process(server.process.pid)
    own, others = {main.pid: _seconds(main)}, 0.0
    for child in main.children(recursive=True):
        if "neso.cli.front_end_process" in child.cmdline():
            own[child.pid] = _seconds(child)
        else:
            others += _seconds(child)
    return own, others


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def send(case: str, ports: dict[str, int], connections: int, seconds: float, tokens: int) -> float:
    """Run the load and return the number of requests or tokens per second."""
    if case != "stream":
        return make_cases()[case].run(Ports(ports["http"], ports["grpc"]), connections, seconds).rate
    body = {"model": MODEL, "prompt": "def", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "post.lua"
        script.write_text(
            f'wrk.method = "POST"\nwrk.body = [[{json.dumps(body)}]]\n'
            'wrk.headers["Content-Type"] = "application/json"\n'
        )
        url = f"http://127.0.0.1:{ports['openai']}/v1/completions"
        command = [
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{seconds:.0f}s",
            "--timeout",
            "30s",
            "-s",
            script,
            url,
        ]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"Requests/sec:\s+([\d.]+)", text)
    if found is None or "Non-2xx" in text:
        raise RuntimeError(text)
    return float(found[1]) * tokens


def measure(server: NesoServer, case: str, connections: int, seconds: float, tokens: int) -> Cost:
    before, others_before = cpu_seconds(server)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    rate = send(case, server.ports, connections, seconds, tokens)
    load = resource.getrusage(resource.RUSAGE_CHILDREN)
    after, others = cpu_seconds(server)
    spent = [after[pid] - before.get(pid, 0.0) for pid in after]
    scale = 1e6 / (rate * seconds)
    return Cost(
        max(spent) * scale,
        sum(spent) * scale,
        (others - others_before) * scale,
        (load.ru_utime + load.ru_stime - used.ru_utime - used.ru_stime) * scale,
        rate,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", nargs="+", default=["json", "grpc", "stream"])
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a stream")
    arguments = parse_arguments(parser, rounds=1, seconds=2, connections=4, tokens=2)
    require_command("wrk", "wrk")
    require_command("h2load", "nghttp2-client")
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder))
        results: dict[tuple[str, int], list[Cost]] = {}
        for _ in range(arguments.rounds):
            for number in arguments.processes:
                with served(
                    f"{MODEL}={SHIPPED_MODELS[MODEL]}",
                    f"--model-repository={folder}",
                    f"--server-processes={number}",
                    "--max-num-seqs=128",
                ) as server:
                    for case in arguments.cases:
                        send(case, server.ports, arguments.connections, 1, arguments.tokens)
                        cost = measure(
                            server, case, arguments.connections, arguments.seconds, arguments.tokens
                        )
                        results.setdefault((case, number), []).append(cost)
    print_results(results, arguments.cases, arguments.processes)


def print_results(results: dict[tuple[str, int], list[Cost]], cases: list[str], numbers: list[int]) -> None:
    """Print the medians of the rounds, and the medians of the ratios of each round."""
    columns = ("busiest", "server", "others", "load", "bound", "rate")
    print(f"{'case':<8}{'processes':>10}" + "".join(f"{name:>10}" for name in columns))
    for case in cases:
        for number in numbers:
            costs = results[case, number]
            values = [statistics.median(getattr(cost, name) for cost in costs) for name in columns]
            print(f"{case:<8}{number:>10}" + "".join(f"{value:>10.1f}" for value in values))
    first = numbers[0]
    for case in cases:
        for number in numbers[1:]:
            pairs = list(zip(results[case, first], results[case, number], strict=True))
            bound = statistics.median(other.bound / base.bound for base, other in pairs)
            rate = statistics.median(other.rate / base.rate for base, other in pairs)
            print(f"{case:<8}{number} / {first} processes: bound {bound:.2f}, rate {rate:.2f}")


if __name__ == "__main__":
    main()
