"""One report about the torch runner on this machine's GPU: the tests and benchmarks that need one, in Markdown.

It begins with a table of the results. Each part is a process of its own on the first GPU. A part that fails or takes
too long is reported, and the others run; the report is written after each. The exit status is 1 if a part has failed,
77 if there is no GPU. docs/guides/gpu.md says what the parts need.

usage: python bench/gpu_report.py [--output gpu-report.md] [--only PART ...] [--timeout 1800] [--two-gpus]
           [--vllm VENV] [--smoke]

`--smoke` runs tiny shapes, also without a GPU, to test the script.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path

from peer_server import machine
from smoke import MISSING, exit_missing, parse_arguments

from neso import __version__
from neso.engine.runners.registry import has_nvidia_gpu

ROOT = Path(__file__).resolve().parent.parent
MIN_FLOAT8 = (8, 9)
"""Compute capability from which float8 is multiplied."""
PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "flash-attn")
STOP_SECONDS = 30.0
"""For a part to stop its servers after its time is up."""
MAX_OUTPUT = 40_000
"""Characters of the output of a part; of a longer one the middle is left out."""
HEADLINE = "headline: "

SEND = """## Send this report

Open an issue at <https://github.com/neso-project/neso/issues/new> with the title "GPU report: " and the name of the
GPU, and attach this file. It has the output of the commands, with paths of this machine, and nothing else about it than
the table above. Please say if other programs used the GPU meanwhile."""


@dataclass(frozen=True)
class Part:
    """A command, run in the root of the checkout."""

    name: str
    title: str
    command: tuple[str, ...]
    all_gpus: bool = False


@dataclass(frozen=True)
class Result:
    """`status`: the exit status; None if the part took too long."""

    part: Part
    status: int | None
    seconds: float
    output: str

    @property
    def outcome(self) -> str:
        if self.status is None:
            return "**too long**"
        return {0: "passed", MISSING: "not run"}.get(self.status, f"**failed** ({self.status})")

    @property
    def failed(self) -> bool:
        return self.status not in (0, MISSING)

    @property
    def headline(self) -> str:
        """The last line of the output that begins with `HEADLINE`; without one or after a failure, the last line."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        found = [line.removeprefix(HEADLINE) for line in lines if line.startswith(HEADLINE)]
        return (found if found and not self.failed else lines or [""])[-1].strip()

    def row(self) -> str:
        headline = self.headline.replace("|", "\\|")
        return f"| {self.part.title} | {self.outcome} | {headline} | {self.seconds:.0f} |"

    def section(self) -> str:
        output = self.output.strip()
        if len(output) > MAX_OUTPUT:
            half = MAX_OUTPUT // 2
            output = f"{output[:half]}\n[... {len(output) - 2 * half} characters ...]\n{output[-half:]}"
        command = " ".join(("python", *self.part.command))
        # Four backquotes: the output may have three.
        return f"## {self.part.title}\n\n`{command}`: {self.outcome}\n\n````text\n{output}\n````\n"


def parts(capability: tuple[int, int], vllm: Path | None, two_gpus: bool) -> list[Part]:
    """Return all parts for a GPU of this compute capability."""
    # Kernels are compiled in the tests, those of FlashInfer for minutes.
    pytest = ("-m", "pytest", "-q", "-rs", "--tb=short", "--timeout=900")
    llama, experts = "bench/gpu_llama.py", "bench/gpu_experts.py"
    kernels = ("bench/gpu_kernels.py", "--targets", "{}{}".format(*capability))
    quantizations = ("int8", "int4", "fp8") if capability >= MIN_FLOAT8 else ("int8", "int4")
    found = [
        Part("tests", "Tests", (*pytest, "tests/gpu")),
        Part("kernels", "Compiled kernels", kernels),
        Part("llama", "Decode and prefill", (llama, "--quantizations", *quantizations)),
        Part("experts", "Experts, bfloat16", (experts,)),
        Part("experts-fp8", "Experts, float8", (experts, "--quantization", "fp8")),
        *(
            Part(name, title, ("bench/gpu_features.py", name))
            for name, title in (
                ("attention", "Attention backends"),
                ("adapters", "LoRA adapters"),
                ("sampling", "Sampling"),
                ("products", "Quantized products"),
                ("graphs", "CUDA graphs"),
                ("overlap", "Overlapped steps"),
            )
        ),
    ]
    if two_gpus:
        command = (*pytest, "tests/gpu/test_torch_ranks_gpu.py")
        found.append(Part("two-gpus", "Tests on two GPUs", command, all_gpus=True))
    if vllm is not None:
        found.append(
            Part("vllm", "Beside vLLM", ("bench/vs_vllm.py", "--gpu", "--venv", str(vllm.absolute())))
        )
    return found


def smoke_parts() -> list[Part]:
    """Return the fastest parts."""
    return [
        Part("tests", "Tests", ("-m", "pytest", "-q", "-rs", "tests/gpu/test_inprocess_gpu.py")),
        Part("experts", "Experts", ("bench/gpu_experts.py", "--smoke")),
    ]


@dataclass(frozen=True)
class Gpu:
    """The first GPU."""

    name: str
    gibibytes: float
    capability: tuple[int, int]
    cuda: str


def find_gpu() -> Gpu | None:
    """Return the first GPU; None if torch finds none."""
    if not has_nvidia_gpu():
        return None
    # In another process: this one would keep memory of the GPU while the parts run.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_read_gpu).result()


def _read_gpu() -> Gpu | None:
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    return Gpu(properties.name, properties.total_memory / 2**30, capability, str(torch.version.cuda))


def describe(gpu: Gpu | None) -> str:
    """Return a table of the machine and the versions."""
    rows = {
        "machine": machine(),
        "Neso": f"{__version__} ({_output('git', 'describe', '--always', '--dirty')})",
    }
    rows["Python"] = sys.version.split()[0]
    rows |= {package: _version(package) for package in PACKAGES}
    if gpu is not None:
        rows |= {
            "GPU": gpu.name,
            "memory": f"{gpu.gibibytes:.1f} GiB",
            "compute capability": "{}.{}".format(*gpu.capability),
            "CUDA": gpu.cuda,
            "all GPUs: driver, power limit, use": _output(
                "nvidia-smi",
                "--query-gpu=name,driver_version,power.limit,utilization.gpu,memory.used",
                "--format=csv,noheader",
            ).replace("\n", "<br>"),
        }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _output(*command: str) -> str:
    """Return the output of a command, "unknown" if it fails or is not installed."""
    if shutil.which(command[0]) is None:
        return "unknown"
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else "unknown"


def run(part: Part, timeout: float, visible: str | None) -> Result:
    """Run a part for at most `timeout` seconds. visible: the GPUs of the machine that it may use; None: all of them."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # The kernels must be compiled.
    environment.pop("TRITON_INTERPRET", None)
    if not part.all_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = (visible or "0").split(",")[0]
    started = time.perf_counter()
    # A file: processes that a part leaves behind would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            (sys.executable, *part.command),
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout)
        finally:
            _stop(process)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Result(part, status, time.perf_counter() - started, text)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the processes of a part. Its own first: it stops the servers that it has started."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def render(facts: str, results: Sequence[Result]) -> str:
    """Return the report."""
    table = ["| part | result | headline | seconds |", "|---|---|---|---|", *(r.row() for r in results)]
    sections = [result.section() for result in results]
    return "\n\n".join(["# The torch runner on a GPU", "\n".join(table), facts, *sections, SEND]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"))
    parser.add_argument("--only", nargs="+", metavar="PART", help="run only these parts")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds of each part")
    parser.add_argument("--two-gpus", action="store_true", help="also run the tests that need two GPUs")
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="environment of vLLM to compare with")
    arguments = parse_arguments(parser, output=None)
    gpu = find_gpu()
    if gpu is None and not arguments.smoke:
        exit_missing("torch finds no GPU, so there is nothing to report: see docs/guides/gpu.md")
    chosen = (
        smoke_parts()
        if arguments.smoke or gpu is None
        else parts(gpu.capability, arguments.vllm, arguments.two_gpus)
    )
    if arguments.only:
        known = [part.name for part in chosen]
        if unknown := sorted(set(arguments.only) - set(known)):
            parser.error(f"--only: there is no part {unknown[0]}, but {', '.join(known)}")
        chosen = [part for part in chosen if part.name in arguments.only]
    facts, results = describe(gpu), list[Result]()
    for number, part in enumerate(chosen, 1):
        print(f"{number} of {len(chosen)}: {part.title} ...", file=sys.stderr, flush=True)
        results.append(run(part, arguments.timeout, os.environ.get("CUDA_VISIBLE_DEVICES")))
        print(f"  {results[-1].outcome}, {results[-1].seconds:.0f} s", file=sys.stderr, flush=True)
        if arguments.output is not None:
            arguments.output.write_text(render(facts, results))
    if arguments.output is None:
        print(render(facts, results))
    else:
        print(f"the report is in {arguments.output}; its end says where to send it")
    if failed := [result.part.title for result in results if result.failed]:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
