"""Neso compared to vLLM through the OpenAI API, with the same checkpoint and load: on all cores, or on a GPU.

vLLM has its own environment, .venv-vllm, into which its CPU build is installed if it is missing. With --gpu both
servers run on a GPU, with a larger model and more requests at a time; --venv then has a build of vLLM for GPUs. Both
servers use their defaults, including the prefix cache (no two prompts have a common prefix), except for the number of
threads of vLLM on a CPU, see `vllm`.

usage: python bench/vs_vllm.py [CHECKPOINT] [--venv DIR] [--gpu] [--quick] [--json FILE] [--only neso|vllm]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from checkpoint import write_checkpoint
from load import LoadResult, Workload, run_load
from peer_server import RunningServer, machine, neso, resident_bytes, serve
from smoke import exit_missing, parse_arguments

from neso import __version__ as neso_version

ROOT = Path(__file__).resolve().parent.parent
INSTALLER = ROOT / "scripts" / "install_vllm.py"
VENV = ROOT / ".venv-vllm"
VLLM_PORT = 19100

CASES = {
    "c=1   128/64": Workload(128, 64, 1, 4),
    "c=1  1024/32": Workload(1024, 32, 1, 3),
    "c=16  128/64": Workload(128, 64, 16, 64),
    "c=16 1024/16": Workload(1024, 16, 16, 16),
    "c=16  32/256": Workload(32, 256, 16, 32),
    "c=64  32/256": Workload(32, 256, 64, 128),
    "mixed c=8": Workload(64, 128, 8, 32, long_isl=1024),
}
GPU_CASES = {
    "c=1   128/128": Workload(128, 128, 1, 4),
    "c=1  1024/64": Workload(1024, 64, 1, 4),
    "c=16  512/128": Workload(512, 128, 16, 64),
    "c=64  128/128": Workload(128, 128, 64, 256),
    "c=256 128/128": Workload(128, 128, 256, 768),
    "mixed c=64": Workload(64, 128, 64, 256, long_isl=1024),
}
SMOKE_CASES = {"c=2 16/4": Workload(16, 4, 2, 2)}


@dataclass(frozen=True)
class Measured:
    """Results of a server: seconds from its start to the first response, and resident bytes after the load."""

    first_response: float
    resident: int
    cases: dict[str, LoadResult]


def install_vllm(venv: Path) -> str:
    """Install vLLM's CPU build unless vLLM is installed; returns its version."""
    if not list(venv.glob("lib/python3.*/site-packages/vllm")):
        subprocess.run([sys.executable, str(INSTALLER), str(venv)], check=True)
    info = next(venv.glob("lib/python3.*/site-packages/vllm-*.dist-info"))
    return info.name.removeprefix("vllm-").removesuffix(".dist-info")


def is_for_gpus(venv: Path) -> bool:
    """Whether an environment has a build of vLLM that is not the one for CPUs."""
    versions = [info.name for info in venv.glob("lib/python3.*/site-packages/vllm-*.dist-info")]
    return bool(versions) and not any("cpu" in version for version in versions)


def vllm(venv: Path, model: Path):  # type: ignore[no-untyped-def]
    """Run vLLM; on a CPU with one thread per core, like Neso: by default it reserves a core for its frontend."""
    command = [str(venv / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", "model", "--port", str(VLLM_PORT), "--max-model-len", "2048"]
    # On a GPU, vLLM's kernels may be compiled by programs of the system, such as nvcc.
    path = os.environ.get("PATH", "") if is_for_gpus(venv) else "/usr/bin:/bin"
    environment = {"HF_HUB_OFFLINE": "1", "PATH": f"{venv / 'bin'}:{path}"}
    if not is_for_gpus(venv):
        environment |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        }
    return serve("vllm", command, f"http://127.0.0.1:{VLLM_PORT}", "model", environment=environment)


def measure(server: RunningServer, cases: dict[str, Workload], quick: bool) -> Measured:
    """Run and print all cases, after a warm-up."""
    started = time.perf_counter()
    run_load(server.url, server.model, Workload(32, 1, 1, 1, seed=98))
    first = server.start_seconds + time.perf_counter() - started
    print(f"{server.name}: first response {first:.2f} s after the start")
    run_load(server.url, server.model, Workload(128, 16, 4, 8, seed=99))
    results = {}
    for name, workload in cases.items():
        if quick:
            workload = dataclasses.replace(
                workload, requests=max(workload.concurrency, workload.requests // 4)
            )
        results[name] = run_load(server.url, server.model, workload)
        print(f"{server.name:5} {name:14} {results[name]}", flush=True)
    resident = resident_bytes(server.pid)
    print(f"{server.name}: {resident / 1e6:.0f} MB resident")
    return Measured(first, resident, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--venv", type=Path, default=VENV)
    parser.add_argument("--gpu", action="store_true", help="run both servers on a GPU")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=["neso", "vllm"])
    arguments = parse_arguments(parser, only="neso")
    if arguments.only != "neso" and arguments.gpu != is_for_gpus(arguments.venv):
        builds = "no build of vLLM for GPUs" if arguments.gpu else "a build of vLLM for GPUs: add --gpu"
        exit_missing(f"{arguments.venv} has {builds}")
    size = "s" if arguments.smoke else "l" if arguments.gpu else "m"
    cases = SMOKE_CASES if arguments.smoke else GPU_CASES if arguments.gpu else CASES
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.checkpoint or Path(folder) / size
        if not model.exists():
            write_checkpoint(model, size)
        vllm_version = install_vllm(arguments.venv) if arguments.only != "neso" else ""
        print(f"{machine()}; Neso {neso_version}, vLLM {vllm_version}")
        results = {}
        if arguments.only != "vllm":
            with neso(model) as server:
                results["neso"] = measure(server, cases, arguments.quick)
        if arguments.only != "neso":
            with vllm(arguments.venv, model) as server:
                results["vllm"] = measure(server, cases, arguments.quick)
    if len(results) == 2:
        report(results["neso"], results["vllm"])
    if arguments.json:
        plain = {name: dataclasses.asdict(measured) for name, measured in results.items()}
        versions = {"neso": neso_version, "vllm": vllm_version}
        arguments.json.write_text(
            json.dumps({"machine": machine(), "versions": versions, "servers": plain}, indent=1)
        )


def report(ours: Measured, theirs: Measured) -> None:
    print("Neso / vLLM (tok/s, goodput: higher is better; times as vLLM / Neso: higher is better)")
    print(f"start to first response {theirs.first_response / ours.first_response:.1f}")
    for name, our in ours.cases.items():
        their = theirs.cases[name]
        goodput = f"{our.goodput / their.goodput:.2f}" if their.goodput else f"{our.goodput:.2f} : 0"
        print(
            f"{name:14} tok/s {our.output_tokens_per_second / their.output_tokens_per_second:5.2f}  "
            f"TTFT {their.ttft_p50 / our.ttft_p50:5.2f}  ITL {their.itl_p50 / our.itl_p50:5.2f}  "
            f"goodput {goodput}  ITL p99 / p50 {our.itl_p99 / our.itl_p50:.2f}, "
            f"vLLM's {their.itl_p99 / their.itl_p50:.2f}"
        )
    rates = [
        f"{name} {our.output_tokens_per_second / theirs.cases[name].output_tokens_per_second:.2f}"
        for name, our in ours.cases.items()
    ]
    print(f"headline: tok/s as a multiple of vLLM's: {', '.join(rates)}")


if __name__ == "__main__":
    main()
