"""Neso compared to llama.cpp at concurrency 1, with the same checkpoint and number of threads.

llama.cpp runs as a bare loop (llama-cpp-python's `eval`) and as llama-cpp-python's OpenAI server, Neso as its whole
server. llama.cpp is built from source into its own virtual environment, unless it is installed there.

usage: python bench/vs_llamacpp.py [CHECKPOINT] [--venv DIR] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpoint import write_checkpoint
from gguf import GGMLQuantizationType
from gguf_checkpoint import write_gguf
from load import LoadResult, Workload, one_token_words, run_load
from peer_server import RunningServer, machine, neso, serve
from smoke import parse_arguments, require_environment

from neso import __version__ as neso_version

LLAMA_VERSION = "0.3.36"
LLAMA_PORT = 19200
VENV = Path.home() / ".cache" / "neso-bench" / "llamacpp"

# CPU features that ggml supports, with the kernel's names. Without AMX: version 0.3.36 crashes with AMX at the first
# product of Q8_0 or Q4_0 (`ggml_backend_amx_mul_mat`), and GGML_NATIVE enables AMX if the CPU supports it.
CPU_FEATURES = {
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi2": "BMI2",
    "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
}
PAIRS = {"BF16": (), "Q8_0": ("--quantization", "int8"), "Q4_0": ("--quantization", "int4")}
DECODED = 64

# One process per file, which prints JSON.
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
print(json.dumps(result))
"""


@dataclass(frozen=True)
class Figures:
    """Milliseconds to the first token of each prompt, and per decoded token."""

    prefill_128: float
    prefill_1024: float
    decode: float

    @classmethod
    def best(cls, rounds: list[Figures]) -> Figures:
        """Minimum of each figure, because other load on the machine can only increase it."""
        return cls(*(min(values) for values in zip(*(asdict(r).values() for r in rounds), strict=True)))


def cmake_args() -> str:
    """CMake arguments of the fastest working build for this CPU."""
    flags = Path("/proc/cpuinfo").read_text().split()
    if "amx_tile" not in flags:
        return "-DGGML_NATIVE=ON"
    features = (f"-DGGML_{name}=ON" for flag, name in CPU_FEATURES.items() if flag in flags)
    return " ".join(["-DGGML_NATIVE=OFF", *features])


def install(venv: Path) -> None:
    """Create the environment with llama-cpp-python and its server, unless it exists."""
    if list(venv.glob(f"lib/python3.*/site-packages/llama_cpp_python-{LLAMA_VERSION}.dist-info")):
        return
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "pip"), "install", "--quiet", "--no-binary", "llama-cpp-python"]
    environment = {**os.environ, "CMAKE_ARGS": cmake_args()}
    subprocess.run([*pip, f"llama-cpp-python[server]=={LLAMA_VERSION}"], check=True, env=environment)


def run_loop(venv: Path, file: Path) -> Figures:
    command = [str(venv / "bin" / "python"), "-c", LOOP, str(file)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(output.splitlines()[-1])
    return Figures(found["prefill 128"], found["prefill 1024"], found["decode"])


def llamacpp_server(venv: Path, file: Path) -> AbstractContextManager[RunningServer]:
    """Run llama-cpp-python's server, which accepts prompts as text only and generates for one request at a time."""
    threads = str(os.cpu_count())
    command = [str(venv / "bin" / "python"), "-m", "llama_cpp.server", "--model", str(file)]
    command += ["--port", str(LLAMA_PORT), "--n_threads", threads, "--n_threads_batch", threads]
    # By default, the server computes logits for every position of a prompt, and a new request ends the running one.
    command += ["--n_batch", "1024", "--logits_all", "false", "--interrupt_requests", "false"]
    command += ["--verbose", "false"]
    return serve("llamacpp", command, f"http://127.0.0.1:{LLAMA_PORT}", "model")


def run_llamacpp_server(venv: Path, file: Path, words: list[str]) -> Figures:
    with llamacpp_server(venv, file) as server:
        return measure(server, words)


def run_neso(model: Path, options: tuple[str, ...]) -> Figures:
    with neso(model, *options) as server:
        return measure(server, None)


def measure(server: RunningServer, words: list[str] | None) -> Figures:
    """TTFT of prompts and ITL, after a warm-up."""

    def load(isl: int, osl: int, requests: int, seed: int) -> LoadResult:
        workload = Workload(isl, osl, 1, requests, seed=seed)
        return run_load(server.url, server.model, workload, words=words)

    load(32, 8, 2, 99)
    load(1024, 2, 1, 98)
    # Two tokens, because a server may hold back the first one if it is an incomplete character.
    short, long = load(128, 2, 5, 1), load(1024, 2, 3, 2)
    return Figures(short.ttft_p50, long.ttft_p50, load(64, DECODED, 2, 3).itl_p50)


def compare(model: Path, files: dict[str, Path], venv: Path, rounds: int) -> dict[str, dict[str, Figures]]:
    """Best results of the rounds, by system and weight type of the files."""
    words = one_token_words(model)
    found: dict[str, dict[str, list[Figures]]] = {
        name: {kind: [] for kind in files} for name in ("llama.cpp loop", "llama.cpp server", "neso server")
    }
    for _ in range(rounds):
        for kind, file in files.items():
            found["llama.cpp loop"][kind].append(run_loop(venv, file))
            found["llama.cpp server"][kind].append(run_llamacpp_server(venv, file, words))
            found["neso server"][kind].append(run_neso(model, PAIRS[kind]))
    return {name: {kind: Figures.best(runs) for kind, runs in of.items()} for name, of in found.items()}


def report(results: dict[str, dict[str, Figures]]) -> None:
    ours = results["neso server"]
    for kind in ours:
        for name, of in results.items():
            cells = [
                f"{what} {value:7.1f} ({value / asdict(ours[kind])[what]:4.2f} x)"
                for what, value in asdict(of[kind]).items()
            ]
            print(f"{kind:5} {name:17} " + "   ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--venv", type=Path, default=VENV)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parse_arguments(parser, rounds=1)
    if arguments.smoke:
        require_environment(arguments.venv, "run bench/vs_llamacpp.py, which builds it")
    install(arguments.venv)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.checkpoint or Path(folder) / "m"
        if not model.exists():
            write_checkpoint(model, "s" if arguments.smoke else "m")
        kinds = ("BF16",) if arguments.smoke else PAIRS
        files = {kind: Path(folder) / f"{kind}.gguf" for kind in kinds}
        for kind, file in files.items():
            write_gguf(model, file, GGMLQuantizationType[kind])
        results = compare(model, files, arguments.venv, arguments.rounds)
    versions = {"neso": neso_version, "llama-cpp-python": LLAMA_VERSION}
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{machine()}; {named}; ms, best of {arguments.rounds} rounds (x: times Neso's)")
    report(results)
    if arguments.json:
        plain = {
            name: {kind: asdict(figures) for kind, figures in of.items()} for name, of in results.items()
        }
        arguments.json.write_text(json.dumps({"machine": machine(), "versions": versions, **plain}, indent=1))


if __name__ == "__main__":
    main()
