"""Neso against llama.cpp at concurrency 1: the same checkpoint, the same threads, in turn.

llama.cpp runs as a bare loop (llama-cpp-python, `eval`), Neso through its whole server. llama.cpp is built from source
into a virtual environment of its own; give one that has it, or a folder to make it in. It is built without ggml's AMX
code: with it, version 0.3.36 crashes at the first product of Q8_0 or Q4_0 (`ggml_backend_amx_mul_mat`).

usage: python bench/vs_llamacpp.py [CHECKPOINT] --venv DIR [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpoint import write_checkpoint
from gguf import GGMLQuantizationType
from gguf_checkpoint import write_gguf
from load import Workload, run_load
from peer_server import machine, neso

CMAKE_ARGS = "-DGGML_NATIVE=OFF " + " ".join(
    f"-DGGML_{feature}=ON"
    for feature in "AVX AVX2 FMA F16C BMI2 AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16".split()
)
PAIRS = {"BF16": (), "Q8_0": ("--quantization", "int8"), "Q4_0": ("--quantization", "int4")}
PROMPTS, DECODED = (128, 1024), 64

# One process a file: what it prints is JSON.
LOOP = """
import json, random, sys, time, os
import llama_cpp
rng = random.Random(0)
tokens = lambda n: [rng.randrange(6, 8000) for _ in range(n)]
threads = os.cpu_count()
settings = {"n_threads": threads, "n_threads_batch": threads, "n_ctx": 2048, "n_batch": 1024, "verbose": False}
model = llama_cpp.Llama(sys.argv[1], **settings)
def timed(prompt):
    started = time.perf_counter()
    model.eval(prompt)
    return 1e3 * (time.perf_counter() - started)
def prefill(length):
    model.reset()
    return timed(tokens(length))
prefill(32)
result = {f"prefill {n}": min(prefill(n) for _ in range(3)) for n in (128, 1024)}
prefill(64)
steps = sorted(timed(tokens(1)) for _ in range(64))
result["decode"] = steps[len(steps) // 2]
print(json.dumps({"version": llama_cpp.__version__, **result}))
"""


@dataclass(frozen=True)
class Figures:
    """Milliseconds: prompts to their first token, and a decoded token."""

    prefill_128: float
    prefill_1024: float
    decode: float

    @classmethod
    def best(cls, rounds: list[Figures]) -> Figures:
        """The least of each: others on the machine only ever add."""
        return cls(*(min(values) for values in zip(*(asdict(r).values() for r in rounds), strict=True)))


def install(venv: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "pip"), "install", "--quiet", "--no-binary", "llama-cpp-python"]
    subprocess.run([*pip, "llama-cpp-python"], check=True, env={**os.environ, "CMAKE_ARGS": CMAKE_ARGS})


def run_llamacpp(venv: Path, file: Path) -> tuple[str, Figures]:
    command = [str(venv / "bin" / "python"), "-c", LOOP, str(file)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(output.splitlines()[-1])
    return found["version"], Figures(found["prefill 128"], found["prefill 1024"], found["decode"])


def run_neso(model: Path, options: tuple[str, ...]) -> Figures:
    with neso(model, *options) as server:

        def load(isl: int, osl: int, requests: int, seed: int):  # type: ignore[no-untyped-def]
            return asyncio.run(run_load(server.url, server.model, Workload(isl, osl, 1, requests, seed=seed)))

        load(32, 8, 2, 99)
        load(1024, 2, 1, 98)
        short, long = load(128, 1, 3, 1), load(1024, 1, 3, 2)
        return Figures(short.ttft_p50, long.ttft_p50, load(64, DECODED, 2, 3).itl_p50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not (arguments.venv / "bin").exists():
        install(arguments.venv)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.checkpoint or Path(folder) / "m"
        if not model.exists():
            write_checkpoint(model, "m")
        files = {kind: Path(folder) / f"{kind}.gguf" for kind in PAIRS}
        for kind, file in files.items():
            write_gguf(model, file, GGMLQuantizationType[kind])
        compare(model, files, arguments.venv, arguments.rounds, arguments.json)


def compare(model: Path, files: dict[str, Path], venv: Path, rounds: int, target: Path | None) -> None:
    theirs, ours = defaultdict(list), defaultdict(list)
    version = ""
    for _ in range(rounds):
        for kind, options in PAIRS.items():
            version, figures = run_llamacpp(venv, files[kind])
            theirs[kind].append(figures)
            ours[kind].append(run_neso(model, options))
    print(f"{machine()}; llama-cpp-python {version}; best of {rounds} rounds, ms (llama.cpp / Neso = ratio)")
    for kind in PAIRS:
        their, our = Figures.best(theirs[kind]), Figures.best(ours[kind])
        cells = [
            f"{name} {asdict(their)[name]:7.1f} / {asdict(our)[name]:6.1f} = "
            f"{asdict(their)[name] / asdict(our)[name]:4.2f}"
            for name in asdict(our)
        ]
        print(f"{kind:5} " + "   ".join(cells))
    if target:
        figures = {
            name: {kind: asdict(Figures.best(found)) for kind, found in of.items()}
            for name, of in (("llama.cpp", theirs), ("neso", ours))
        }
        target.write_text(
            json.dumps({"machine": machine(), "llama-cpp-python": version, **figures}, indent=1)
        )


if __name__ == "__main__":
    main()
