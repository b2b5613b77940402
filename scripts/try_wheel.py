"""Install a wheel where no compiler can be found, start the server, and ask the model that ships with Neso.

    python scripts/try_wheel.py dist                       # the wheel in the folder that fits this Python
    python scripts/try_wheel.py WHEEL --tests tests/engine/runners/test_native_kernels.py

Prints how long it took and how large the installation is; exits non-zero if anything fails.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from find_wheel import find_wheel

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What is chunked prefill?"
START_SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="a wheel, or a folder with wheels")
    parser.add_argument(
        "--tests", nargs="+", default=[], help="test files, without need of torch, to run against it"
    )
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve()
    if wheel.is_dir():
        found = find_wheel(wheel, ROOT)
        if found is None:
            parser.error(
                f"no wheel in {wheel} fits this Python, and is of this version and newer than the sources"
            )
        wheel = found
    with tempfile.TemporaryDirectory() as scratch:
        try_wheel(wheel, Path(scratch), arguments.tests)


def try_wheel(wheel: Path, scratch: Path, tests: list[str]) -> None:
    venv = scratch / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    before = size_mb(venv)
    # A PATH with nothing but this environment: no compiler, no CMake. Nothing of the checkout is imported.
    environment = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX", "PYTHONPATH")}
    environment["PATH"] = str(venv / "bin")
    start = time.perf_counter()
    pip = [venv / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pip += ["--only-binary", ":all:", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, wheel], check=True, env=environment, cwd=scratch)
    seconds = time.perf_counter() - start
    size = size_mb(venv) - before
    print(
        f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, installed {size:.0f} MB in {seconds:.0f} s",
        flush=True,
    )
    ask_server(venv, environment, scratch)
    if tests:
        subprocess.run(
            [*pip, "pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"], check=True, env=environment
        )
        pytest = [venv / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        pytest += ["--noconftest", "--hypothesis-profile=ci"]  # the tests' own settings need torch
        subprocess.run([*pytest, *(ROOT / test for test in tests)], check=True, env=environment, cwd=scratch)


def ask_server(venv: Path, environment: dict[str, str], scratch: Path) -> None:
    port = free_port()
    flags = [f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false", "--allow-openai=false"]
    start = time.perf_counter()
    server = subprocess.Popen([venv / "bin" / "neso", "serve", *flags], env=environment, cwd=scratch)
    try:
        while not is_ready(port):
            if server.poll() is not None:
                raise SystemExit(f"neso serve exited with {server.returncode}")
            if time.perf_counter() - start > START_SECONDS:
                raise SystemExit(f"neso serve is not ready after {START_SECONDS} s")
            time.sleep(0.1)
        print(f"neso serve: ready after {time.perf_counter() - start:.1f} s", flush=True)
        body = {"text_input": QUESTION, "temperature": 0, "max_tokens": 40}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v2/models/neso-pilot/generate", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
            answer = json.load(response)["text_output"].strip()
        print(f"{QUESTION} {answer}")
        if "prefill" not in answer:
            raise SystemExit("the answer is not about prefill")
    finally:
        server.terminate()
        server.wait()


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def size_mb(folder: Path) -> float:
    """Size of all files in the folder, in MB (10^6 bytes)."""
    return (
        sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        / 1e6
    )


if __name__ == "__main__":
    main()
