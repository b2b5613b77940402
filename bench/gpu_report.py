"""One report about the torch runner on this machine's GPU: the tests and benchmarks that need one, in Markdown.

A part that fails is reported, and the others run. The exit status is 1 if one has failed, 77 if there is no GPU.

usage: python bench/gpu_report.py [--output gpu-report.md] [--smoke]

`--smoke` runs tiny shapes, also without a GPU, to test the script.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from peer_server import machine
from smoke import exit_missing, parse_arguments

from neso import __version__

ROOT = Path(__file__).resolve().parent.parent
MIN_FLOAT8 = (8, 9)
"""Compute capability from which float8 is multiplied."""


@dataclass(frozen=True)
class Part:
    """A command and what it tells; run in the root of the checkout."""

    title: str
    command: tuple[str, ...]


def parts(smoke: bool) -> list[Part]:
    pytest, llama, kernels = ("-m", "pytest", "-q", "-rs"), "bench/gpu_llama.py", "bench/gpu_kernels.py"
    experts = "bench/gpu_experts.py"
    if smoke:
        return [
            Part("Tests", (*pytest, "tests/gpu/test_inprocess_gpu.py")),
            Part("Decode and prefill", (llama, "--smoke")),
        ]
    capability = torch.cuda.get_device_capability()
    found = [
        Part("Tests", (*pytest, "tests/gpu")),
        Part("Compiled kernels", (kernels, "--targets", "{}{}".format(*capability))),
        Part("Decode and prefill, bfloat16", (llama,)),
        Part("Experts, bfloat16", (experts,)),
        Part("Experts, float8", (experts, "--quantization", "fp8")),
    ]
    if capability >= MIN_FLOAT8:
        found.append(Part("Decode and prefill, float8", (llama, "--quantization", "fp8")))
    return found


def describe() -> str:
    """Return a table of the GPU and the versions."""
    rows = {
        "machine": machine(),
        "Neso": __version__,
        "torch": torch.__version__,
        "Triton": triton.__version__,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        rows |= {
            "GPU": f"{torch.cuda.device_count()} x {properties.name}",
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
            "compute capability": f"{properties.major}.{properties.minor}",
            "CUDA": str(torch.version.cuda),
        }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def run(part: Part) -> tuple[str, bool]:
    """Run a part; returns its section of the report, and whether it has succeeded."""
    started = time.perf_counter()
    result = subprocess.run(
        (sys.executable, *part.command), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    ended = f"exit status {result.returncode} after {time.perf_counter() - started:.0f} s"
    head = f"## {part.title}\n\n`python {' '.join(part.command)}`: {ended}\n"
    return f"{head}\n```text\n{result.stdout.strip()}\n```\n", result.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"))
    arguments = parse_arguments(parser, output=None)
    if not arguments.smoke and not torch.cuda.is_available():
        exit_missing("torch finds no GPU, so there is nothing to report: see docs/guides/gpu.md")
    sections, failed = [f"# The torch runner on a GPU\n\n{describe()}\n"], []
    for part in parts(arguments.smoke):
        print(f"{part.title} ...", file=sys.stderr, flush=True)
        section, succeeded = run(part)
        sections.append(section)
        if not succeeded:
            failed.append(part.title)
    report = "\n".join(sections)
    if arguments.output is None:
        print(report)
    else:
        arguments.output.write_text(report)
        print(f"the report is in {arguments.output}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
