"""Install a wheel where no compiler can be found, start the server, and ask the model that ships with Neso.

    python scripts/try_wheel.py dist                       # the wheel in the folder that fits this Python
    python scripts/try_wheel.py WHEEL --tests tests/engine/runners/test_native_kernels.py
    python scripts/try_wheel.py WHEEL --debian bookworm    # as root: in a minimal Debian with python3-venv alone

The first form hides compilers by an empty PATH. `--debian` needs `mmdebstrap`, and a wheel for that release's Python.

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
from collections.abc import Sequence
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
    parser.add_argument(
        "--debian", metavar="RELEASE", help="release of Debian to make, and to try the wheel in"
    )
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve()
    if arguments.debian and (arguments.tests or wheel.is_dir()):
        parser.error("--debian takes a wheel, and no tests")
    if wheel.is_dir():
        found = find_wheel(wheel, ROOT)
        if found is None:
            parser.error(
                f"no wheel in {wheel} fits this Python, and is of this version and newer than the sources"
            )
        wheel = found
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.debian:
            try_in_debian(wheel, arguments.debian, Path(scratch))
        else:
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
    ask_server([venv / "bin" / "neso"], environment, scratch)
    if tests:
        subprocess.run(
            [*pip, "pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"], check=True, env=environment
        )
        pytest = [venv / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        pytest += ["--noconftest", "--hypothesis-profile=ci"]  # the tests' own settings need torch
        subprocess.run([*pytest, *(ROOT / test for test in tests)], check=True, env=environment, cwd=scratch)


def try_in_debian(wheel: Path, release: str, scratch: Path) -> None:
    root, packages = scratch / "debian", "--include=python3,python3-venv"
    subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", packages, release, root], check=True)
    chroot: list[str | Path] = ["chroot", root]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    found = subprocess.run(
        [*chroot, "sh", "-c", "command -v cc gcc g++ clang make cmake"],
        env=environment,
        stdout=subprocess.PIPE,
    )
    if found.stdout:
        raise SystemExit(f"the new Debian has a compiler: {found.stdout.decode()}")
    version = subprocess.run(
        [*chroot, "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        check=True,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()
    # What pip would download; it is installed without the network.
    download: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--disable-pip-version-check",
        "--only-binary",
        ":all:",
    ]
    download += ["-c", ROOT / "constraints.txt", "--python-version", version]
    subprocess.run([*download, "-d", root / "wheels", wheel], check=True)
    before = size_mb(root)
    start = time.perf_counter()
    subprocess.run([*chroot, "python3", "-m", "venv", "/neso"], check=True, env=environment)
    install = [*chroot, "/neso/bin/pip", "install", "-q", "--no-index", "--find-links", "/wheels"]
    subprocess.run([*install, f"/wheels/{wheel.name}"], check=True, env=environment)
    print(
        f"Debian {release}, Python {version}, no compiler: {wheel.name} of {wheel.stat().st_size / 1e6:.1f} MB; it and "
        f"{len(list((root / 'wheels').iterdir())) - 1} other wheels of {size_mb(root / 'wheels'):.0f} MB became "
        f"{size_mb(root) - before:.0f} MB in {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    # In a mount namespace of its own, so that the mounts end with the server, and nothing outside sees them.
    mount = (
        'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" /neso/bin/neso "$@"'
    )
    ask_server(["unshare", "--mount", "sh", "-c", mount, root], environment, scratch)


def ask_server(command: Sequence[str | Path], environment: dict[str, str], scratch: Path) -> None:
    """Run `neso serve` by `command`, and ask its model a question. Raises SystemExit if the answer is wrong."""
    port = free_port()
    flags = [f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false", "--allow-openai=false"]
    start = time.perf_counter()
    server = subprocess.Popen([*command, "serve", *flags], env=environment, cwd=scratch)
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
