"""Neso's backend `vllm` compared to vLLM's server, with the same vLLM, checkpoint, engine arguments and load.

Both serve OpenAI streaming completions; Neso also generate_stream. The interpreter is that of .venv-vllm, which
`./neso-test --all` creates. The servers are started and measured in turns, --rounds times each, and medians are
printed. The most stable figure is the CPU time of the front process per token, without the engine's process.

usage: python bench/vllm_backend.py [CHECKPOINT] [--size s|m] [--rounds 2] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from checkpoint import write_checkpoint
from load import LoadResult, Workload, one_token_words, run_load
from peer_server import RunningServer, machine, serve
from smoke import parse_arguments, require_environment
from vs_vllm import ROOT, VENV, install_vllm

VLLM_PORT, NESO_OPENAI_PORT, NESO_HTTP_PORT = 19200, 19201, 19202
ENGINE = {"max_model_len": 2048, "enforce_eager": True}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "PYTHONPATH": str(ROOT),
    # One thread per core; by default vLLM reserves a core for its frontend.
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
}
CASES = {
    "c=1": Workload(128, 64, 1, 4),
    "c=4": Workload(128, 64, 4, 16),
    "c=16": Workload(128, 64, 16, 48),
}
CONFIG = 'backend: "vllm"\ninstance_group [ { count: 1, kind: KIND_MODEL } ]\n'


@contextmanager
def vllm_server(venv: Path, model: Path) -> Iterator[RunningServer]:
    """Run `vllm serve` without request logs, like Neso."""
    command = [str(venv / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", "model", "--port", str(VLLM_PORT), "--disable-uvicorn-access-log"]
    command += ["--max-model-len", str(ENGINE["max_model_len"]), "--enforce-eager"]
    url = f"http://127.0.0.1:{VLLM_PORT}"
    with serve("vllm", command, url, "model", environment=ENVIRONMENT) as server:
        yield server


@contextmanager
def neso_server(venv: Path, model: Path) -> Iterator[RunningServer]:
    """Run `neso serve` on a repository with one model of the backend `vllm`."""
    with tempfile.TemporaryDirectory() as repository:
        version = Path(repository) / "model" / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(CONFIG)
        (version / "model.json").write_text(json.dumps({"model": str(model.resolve()), **ENGINE}))
        command = [
            str(venv / "bin" / "python"),
            "-m",
            "neso.cli",
            "serve",
            f"--model-repository={repository}",
        ]
        command += [f"--openai-port={NESO_OPENAI_PORT}", f"--http-port={NESO_HTTP_PORT}"]
        command += ["--allow-grpc=false", "--allow-metrics=false"]
        url = f"http://127.0.0.1:{NESO_OPENAI_PORT}"
        with serve("neso", command, url, "model", environment=ENVIRONMENT) as server:
            yield server


@dataclass(frozen=True)
class Measured(LoadResult):
    """`cpu`: CPU time of the front process in milliseconds per token."""

    cpu: float

    def __str__(self) -> str:
        return f"{super().__str__()}  front CPU {self.cpu:.3f} ms/token"


def measured(server: RunningServer, workload: Workload, load: Callable[[], LoadResult]) -> Measured:
    before = _cpu_seconds(server)
    result = load()
    cpu = 1e3 * (_cpu_seconds(server) - before) / (workload.requests * workload.osl)
    return Measured(**dataclasses.asdict(result), cpu=cpu)


def _cpu_seconds(server: RunningServer) -> float:
    times = psutil.Process(server.pid).cpu_times()
    return float(times.user + times.system)


def measure(server: RunningServer, words: list[str], quick: bool) -> dict[str, Measured]:
    """Run and print all cases, after a warm-up."""
    run_load(server.url, server.model, Workload(128, 16, 4, 8, seed=99), words=words)
    results = {}
    for name, workload in CASES.items():
        if quick:
            workload = dataclasses.replace(workload, requests=workload.concurrency * 2)
        load = partial(run_load, server.url, server.model, workload, words=words)
        results[name] = measured(server, workload, load)
        print(f"{server.name:4} {name:5} {'/v1/completions':16} {results[name]}", flush=True)
        if server.name == "neso":
            # Different prompts, because the first ones are in the prefix cache.
            again = dataclasses.replace(workload, seed=workload.seed + 1)
            url = f"http://127.0.0.1:{NESO_HTTP_PORT}"
            load = partial(run_load, url, "model", again, words=words, endpoint_type="generate")
            result = measured(server, again, load)
            print(f"{server.name:4} {name:5} {'generate_stream':16} {result}", flush=True)
            results[f"{name} generate"] = result
    return results


def median(results: list[Measured]) -> Measured:
    fields = [field.name for field in dataclasses.fields(Measured)]
    return Measured(**{name: statistics.median(getattr(r, name) for r in results) for name in fields})


def _ratio(numerator: float, denominator: float) -> float:
    """Return the quotient, NaN if the denominator is 0, as CPU times and intervals of a short run can be."""
    return numerator / denominator if denominator else float("nan")


def report(ours: dict[str, Measured], theirs: dict[str, Measured]) -> None:
    print("Neso / vLLM (tok/s: more is better; times as vLLM / Neso: more is better)")
    for name in CASES:
        their = theirs[name]
        for case in (name, f"{name} generate"):
            our = ours[case]
            print(
                f"{case:14} tok/s {our.output_tokens_per_second / their.output_tokens_per_second:5.2f}  "
                f"TTFT {their.ttft_p50 / our.ttft_p50:5.2f}  ITL p50 {_ratio(their.itl_p50, our.itl_p50):5.2f}  "
                f"p99 {_ratio(their.itl_p99, our.itl_p99):5.2f}  "
                f"jitter (ITL p99 / p50) {_ratio(our.itl_p99, our.itl_p50):.2f}, "
                f"vLLM's {_ratio(their.itl_p99, their.itl_p50):.2f}  front CPU {_ratio(their.cpu, our.cpu):.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--size", choices=["s", "m"], default="m")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--venv", type=Path, default=VENV)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parse_arguments(parser, size="s", rounds=1, quick=True)
    if arguments.smoke:
        CASES.clear()
        CASES["c=1"] = Workload(16, 4, 1, 2)
        require_environment(arguments.venv, "python scripts/install_vllm.py .venv-vllm")
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.checkpoint or Path(folder) / arguments.size
        if not model.exists():
            write_checkpoint(model, arguments.size)
        version = install_vllm(arguments.venv)
        words = one_token_words(model)
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        print(f"{machine()}, load {os.getloadavg()[0]:.1f}; vLLM {version}, Neso {commit.stdout.strip()}")
        rounds: dict[str, list[dict[str, Measured]]] = {"neso": [], "vllm": []}
        for _ in range(arguments.rounds):
            for name, start in (("vllm", vllm_server), ("neso", neso_server)):
                with start(arguments.venv, model) as server:
                    print(f"{name}: {server.start_seconds:.1f} s from the start to ready", flush=True)
                    rounds[name].append(measure(server, words, arguments.quick))
    results = {
        name: {case: median([r[case] for r in repeated]) for case in repeated[0]}
        for name, repeated in rounds.items()
    }
    report(results["neso"], results["vllm"])
    if arguments.json:
        plain = {
            name: {case: dataclasses.asdict(result) for case, result in cases.items()}
            for name, cases in results.items()
        }
        arguments.json.write_text(
            json.dumps({"machine": machine(), "vllm": version, "servers": plain}, indent=1)
        )


if __name__ == "__main__":
    main()
