"""Duration of commands, and time from server start to readiness and to the first response.

usage: python bench/start_time.py [--rounds 5]       medians over the rounds, after one that warms the disk cache
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
import urllib.request

from neso_server import NESO, served
from smoke import parse_arguments

BODY = b'{"text_input": "What is in-flight batching?", "temperature": 0}'


def command(*arguments: str) -> float:
    """Measure the seconds of a command."""
    started = time.perf_counter()
    subprocess.run([*NESO, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def serve() -> tuple[float, float]:
    """Seconds from the start of the process until it is ready, and until the first response."""
    started = time.perf_counter()
    with served() as server:
        ready = time.perf_counter() - started
        url = f"http://127.0.0.1:{server.ports['http']}/v2/models/neso-pilot/generate"
        urllib.request.urlopen(url, BODY).read()
        return ready, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parse_arguments(parser, rounds=1).rounds
    serve()
    print(f"neso --version     {statistics.median(command('--version') for _ in range(rounds)):.2f} s")
    print(f"neso serve --help  {statistics.median(command('serve', '--help') for _ in range(rounds)):.2f} s")
    starts = [serve() for _ in range(rounds)]
    print(f"start to ready     {statistics.median(ready for ready, _ in starts):.2f} s")
    print(f"start to response  {statistics.median(answer for _, answer in starts):.2f} s")


if __name__ == "__main__":
    main()
