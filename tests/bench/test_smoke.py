"""Every benchmark script runs with `--smoke`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
MISSING = 77
"""Exit status of a script whose requirements are not installed, see bench/smoke.py."""
SCRIPTS = [
    path
    for path in sorted([*BENCH.glob("*.py"), *BENCH.glob("studies/*.py")])
    if '__name__ == "__main__"' in path.read_text()
]


STOPPABLE = """
import argparse, asyncio, contextlib
from smoke import parse_arguments

@contextlib.contextmanager
def served():
    try:
        yield
    finally:
        print("stopped")

async def run():
    print("running", flush=True)
    await asyncio.sleep(60)

parse_arguments(argparse.ArgumentParser())
with served():
    asyncio.run(run())
"""


def test_termination_stops_what_a_script_has_started() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPABLE], stdout=subprocess.PIPE, text=True, cwd=BENCH
    )
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    process.terminate()
    output, _ = process.communicate()
    assert (output, process.returncode) == ("stopped\n", 128 + signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_benchmark_runs(script: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, script, "--smoke"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=BENCH.parent,
    )
    try:
        output, errors = process.communicate()
    except BaseException:  # the time-out of the test
        process.terminate()  # not `kill`: the script must stop the servers that it has started
        process.wait(30)
        raise
    if process.returncode == MISSING:
        pytest.skip(errors.strip())
    assert process.returncode == 0, output + errors
