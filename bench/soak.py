"""Minutes to hours of all kinds of requests against `neso serve`, checked for errors and leaks.

    python bench/soak.py --minutes 30

Every response is checked: requests of all protocols get their own answer, once. An engine is killed or stopped every
`--kill-secs`; only requests of that engine may fail, with an error that says to retry. At the end nothing may be in
flight, the server's counters must match those of the clients, and memory, file descriptors, threads, processes and
/dev/shm must not have grown. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

from smoke import parse_arguments
from soaking.engines import Killer
from soaking.generation import GENERATION_LOADS, RESTARTING, expect_texts
from soaking.loads import LOADS, Clients, Load, crash, has_own_process
from soaking.models import ENGINES
from soaking.server import ResourceUsage, SoakServer, start

PAUSE = 0.002
"""Pause of a worker between two units of work, in seconds."""
WARM = 0.2
"""Fraction of the run after which memory must no longer grow."""


class LoadResults:
    """Outcomes of one load."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds = 0.0
        self.longest = 0.0

    async def count(self, load: Load, clients: Clients) -> None:
        started = time.monotonic()
        try:
            self.outcomes[await load(clients)] += 1
        except Exception as error:
            self.outcomes["wrong"] += 1
            self.wrong.append(f"{type(error).__name__}: {error}")
        took = time.monotonic() - started
        self.seconds += took
        self.longest = max(self.longest, took)

    def row(self, name: str) -> str:
        done = sum(self.outcomes.values())
        restarting = self.outcomes[RESTARTING]
        refused = done - self.outcomes["ok"] - self.outcomes["wrong"] - restarting
        mean = self.seconds / done * 1e3 if done else 0.0
        counts = f"{done:8} {refused:8} {restarting:10} {self.outcomes['wrong']:6}"
        return f"{name:20} {counts} {mean:8.1f} {self.longest * 1e3:8.0f}"


async def soak(
    server: SoakServer, seconds: float, workers: int, kill_period: float, check_leaks: bool
) -> list[str]:
    """Run the loads and return the errors found."""
    clients = Clients(server)
    try:
        loads = {**LOADS, **GENERATION_LOADS}
        if not await has_own_process(clients):
            del loads[crash]
            print("(models do not run in processes: skip crashes)")
        tallies = {load: LoadResults() for load in loads}
        await expect_texts(clients)
        for load in loads:  # once, so that lazily created resources exist before the first reading
            await tallies[load].count(load, clients)
        readings = [server.resource_usage()]
        end = time.monotonic() + seconds
        killer = Killer(clients, kill_period)

        async def work(load: Load) -> None:
            while time.monotonic() < end and server.alive():
                await tallies[load].count(load, clients)
                await asyncio.sleep(PAUSE)

        tasks = [asyncio.ensure_future(work(load)) for load, n in loads.items() for _ in range(n * workers)]
        tasks.append(asyncio.ensure_future(killer.run(end)))
        while time.monotonic() < end and server.alive():
            await asyncio.sleep(min(5.0, seconds / 20))
            readings.append(server.resource_usage())
        await asyncio.wait(tasks, timeout=60)
        hanging = sum(not task.done() for task in tasks)
        _print_tallies(tallies)
        found = [
            f"{load.__name__}: {text}" for load, results in tallies.items() for text in results.wrong[:3]
        ]
        if hanging:
            found.append(f"{hanging} clients got no response")
        if not server.alive():
            return [*found, "the server has exited"]
        found += await unreleased(clients, killer.count)
        print(f"\n{killer.count} engines killed")
    finally:
        await clients.close()
    await asyncio.sleep(3)
    readings.append(server.resource_usage())
    return found + leaks(readings) if check_leaks else found


async def unreleased(clients: Clients, kills: int) -> list[str]:
    """Return requests that the server still counts as in flight, and counters that differ from the clients'."""
    found: list[str] = []
    for _ in range(300):
        async with clients.http.get(clients.server.url("/metrics", "metrics")) as response:
            lines = (await response.text()).splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        found = [
            f"{name} is {value}"
            for name, value in values.items()
            if name.split("{")[0]
            in (
                "nv_inference_pending_request_count",
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "vllm:kv_cache_usage_perc",
            )
            and float(value)
        ]
        restarts = sum(
            float(values.get(f'neso_process_restarts_total{{model="{model}",version="1"}}', 0))
            for model in ENGINES
        )
        if restarts != kills:
            found.append(f"{kills} engines were killed, {restarts:g} were restarted")
        for model, seen in clients.answered.items():
            if model == "repeat":
                continue  # cancelled requests may have succeeded
            counted = int(float(values[f'nv_inference_request_success{{model="{model}",version="1"}}']))
            # Each request of the ensemble executes this model twice.
            expected = seen + (2 * clients.answered["pipeline"] if model == "batched" else 0)
            if counted != expected:
                found.append(f"{model}: {expected} requests succeeded, the server counted {counted}")
        if not found:
            return []
        await asyncio.sleep(0.1)
    return found


def leaks(readings: list[ResourceUsage]) -> list[str]:
    """Return resources that have grown, from readings before, during and after the load."""
    first, last = readings[0], readings[-1]
    warm = [
        each for each in readings if each.seconds - first.seconds >= WARM * (last.seconds - first.seconds)
    ]
    middle = len(warm) // 2
    print(f"\n{'':18} {'before':>8} {'after':>8}")
    for name in ("rss", "server_rss", "fds", "threads", "processes", "shm"):
        print(f"{name:18} {getattr(first, name):8.0f} {getattr(last, name):8.0f}")
    found = []
    early = sum(each.server_rss for each in warm[:middle]) / max(1, middle)
    late = sum(each.server_rss for each in warm[middle:]) / (len(warm) - middle)
    print(f"server_rss, mean of the first and of the second half when warm: {early:.1f}, {late:.1f} MiB")
    if late > early * 1.03 + 8:
        found.append(f"memory of the server grows: {early:.1f} MiB, later {late:.1f}")
    # During the load the memory of all processes rises and falls by a third, because engines are killed and reloaded.
    if last.rss > first.rss * 1.1 + 8:
        found.append(f"memory of all processes: {first.rss} MiB before, {last.rss} after")
    for name, allowed in (("fds", 8), ("threads", 16), ("processes", 0), ("shm", 0)):
        before, after = getattr(first, name), getattr(last, name)
        if after > before + allowed:
            found.append(f"{name}: {before} before, {after} after")
    return found


def _print_tallies(tallies: dict[Load, LoadResults]) -> None:
    counts = f"{'done':>8} {'rejected':>8} {'no engine':>10} {'wrong':>6}"
    print(f"{'':20} {counts} {'mean ms':>8} {'max ms':>8}")
    for load, results in tallies.items():
        print(results.row(load.__name__))


def main() -> int:
    from soaking.models import write_repository

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=1, help="factor of the number of workers of each load")
    parser.add_argument(
        "--kill-secs", type=float, default=60.0, help="seconds between two kills of an engine"
    )
    arguments = parse_arguments(parser, minutes=0.2, kill_secs=4.0)
    with tempfile.TemporaryDirectory(prefix="neso-soak-") as name:
        folder = Path(name)
        write_repository(folder / "models")
        with start(folder / "models", folder / "log") as server:
            found = asyncio.run(
                soak(
                    server,
                    arguments.minutes * 60,
                    arguments.workers,
                    arguments.kill_secs,
                    check_leaks=not arguments.smoke,
                )
            )
        errors = [line for line in (folder / "log").read_text().splitlines() if "Traceback" in line]
    if errors and not found:
        found.append(f"{len(errors)} tracebacks in the server's log")
    print("\n" + ("\n".join(found) if found else "no errors, no leaks"))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
