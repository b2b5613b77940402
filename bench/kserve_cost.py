"""CPU time per infer request, of the server by thread and of the load generator, and the resulting maximum rate.

    apt-get install wrk nghttp2-client
    python bench/kserve_cost.py [--seconds 2] [--rounds 5] [--connections 1 16 64] [--cases json binary grpc]
                                [--base CHECKOUT] [--triton]

Models and requests are those of kserve_infer.py. Measures Neso alone, or in turns with another built checkout
(`--base`) and with Triton (`--triton`). Prints microseconds per request of the best round, since other load can only
increase the times. `loop` is the first thread of the server, which runs Neso's frontends and scheduler, `others` its
other threads and processes, `load` the load generator. `max/s` is the rate that two cores allow at these times: both of
them, and for Neso, whose threads share the interpreter, one.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
from infer_cases import Case, Ports, make_cases, write_repository
from peer_server import RunningServer, machine, serve
from smoke import parse_arguments, require_command
from triton_server import GRPC_PORT, HTTP_PORT, install, triton

CORES = 2


@dataclass(frozen=True)
class Cost:
    """CPU time per request in µs by part, rate, and median latency (ms)."""

    loop_user: float
    loop_system: float
    others_user: float
    others_system: float
    load: float
    rate: float
    p50: float

    @property
    def server(self) -> float:
        return self.loop_user + self.loop_system + self.others_user + self.others_system

    def max_rate(self, *, takes_turns: bool) -> float:
        """Maximum requests per second on `CORES` cores."""
        both = (self.server + self.load) / CORES
        return 1e6 / (max(both, self.server) if takes_turns else both)


@dataclass(frozen=True)
class Times:
    """CPU time of threads, in seconds and in ticks; ticks separate user and system time."""

    seconds: float = 0.0
    user_ticks: int = 0
    system_ticks: int = 0

    def __add__(self, other: Times) -> Times:
        return Times(
            self.seconds + other.seconds,
            self.user_ticks + other.user_ticks,
            self.system_ticks + other.system_ticks,
        )

    def __sub__(self, other: Times) -> Times:
        return self + Times(-other.seconds, -other.user_ticks, -other.system_ticks)

    def split(self, scale: float) -> tuple[float, float]:
        """User and system time, multiplied by `scale`."""
        system = self.seconds * self.system_ticks / max(self.user_ticks + self.system_ticks, 1)
        return (self.seconds - system) * scale, system * scale


def cpu_times(pid: int) -> tuple[Times, Times]:
    """CPU time of a process: of its first thread, and of its other threads and its children."""
    first, others = Times(), Times()
    for member in (pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))):
        for task in Path(f"/proc/{member}/task").iterdir():
            ticks = (task / "stat").read_text().rpartition(")")[2].split()[11:13]
            times = Times(
                int((task / "schedstat").read_text().split()[0]) / 1e9, int(ticks[0]), int(ticks[1])
            )
            if task.name == str(pid):
                first = times
            else:
                others += times
    return first, others


def measure(case: Case, ports: Ports, pid: int, connections: int, seconds: float) -> Cost:
    """Run the load once and measure CPU times."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    load_before = usage.ru_utime + usage.ru_stime
    before = cpu_times(pid)
    load = case.run(ports, connections, seconds)
    after = cpu_times(pid)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    micro = 1e6 / (load.rate * seconds)
    loop, others = (new - old for new, old in zip(after, before, strict=True))
    load_cpu = (usage.ru_utime + usage.ru_stime - load_before) * micro
    return Cost(*loop.split(micro), *others.split(micro), load_cpu, load.rate, load.p50)


def neso(name: str, checkout: Path, repository: Path, ports: Ports) -> AbstractContextManager[RunningServer]:
    """Run `neso serve` from a checkout."""
    command = [sys.executable, "-m", "neso.cli", "serve", f"--model-repository={repository}"]
    command += [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}"]
    command += ["--allow-metrics=false", "--allow-openai=false"]
    url, environment = f"http://127.0.0.1:{ports.http}", {"PYTHONPATH": str(checkout)}
    return serve(name, command, url, "", environment=environment, probe="/v2/health/ready")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64])
    cases = make_cases()
    parser.add_argument("--cases", nargs="+", default=["json", "binary", "grpc"], choices=list(cases))
    parser.add_argument("--base", type=Path, help="another checkout, built, to compare with")
    parser.add_argument("--triton", action="store_true", help="measure Triton too")
    options = parse_arguments(parser, seconds=1, rounds=1, connections=[1], cases=["json"])
    require_command("wrk", "wrk")
    here = Path(__file__).resolve().parent.parent
    with ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_repository(repository)
        servers: dict[str, tuple[Ports, int]] = {}
        for name, checkout, ports in (
            ("base", options.base, Ports(19010, 19011)),
            ("neso", here, Ports(19000, 19001)),
        ):
            if checkout is not None:
                servers[name] = ports, stack.enter_context(neso(name, checkout, repository, ports)).pid
        if options.triton:
            running = stack.enter_context(triton(install(), repository))
            servers["triton"] = Ports(HTTP_PORT, GRPC_PORT), running.pid
        print(machine())
        print("case   conns server  loop user  sys  others user  sys  server   load    req/s  p50 ms   max/s")
        for name in options.cases:
            for connections in options.connections:
                costs: dict[str, list[Cost]] = {server: [] for server in servers}
                for ports, _ in servers.values():
                    cases[name].run(ports, connections, 1)
                for _ in range(options.rounds):
                    for server, (ports, pid) in servers.items():
                        costs[server].append(measure(cases[name], ports, pid, connections, options.seconds))
                for server, runs in costs.items():
                    show(name, connections, server, runs, costs.get("base"))


def show(case: str, connections: int, server: str, runs: list[Cost], base: list[Cost] | None) -> None:
    cost = min(runs, key=lambda run: run.server)
    rate = cost.max_rate(takes_turns=server != "triton")
    line = f"{case:6} {connections:5} {server:7} {cost.loop_user:9.1f} {cost.loop_system:4.1f} "
    line += f"{cost.others_user:12.1f} {cost.others_system:4.1f} {cost.server:7.1f} {cost.load:6.1f} "
    line += f"{cost.rate:8,.0f} {cost.p50:7.3f} {rate:7,.0f}"
    if base is not None and runs is not base:
        # The two of a pair are measured one after the other, so that both have the same background load.
        pairs = [ours.rate / theirs.rate for ours, theirs in zip(runs, base, strict=True)]
        line += f"   {statistics.median(pairs):.2f}x the rate of base"
    print(line, flush=True)


if __name__ == "__main__":
    main()
