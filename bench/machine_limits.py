"""Measures memory bandwidth and matrix product rates of this machine, the limits that other benchmarks compare to.

usage: python bench/machine_limits.py [--threads N] [--isa LEVEL] [--json FILE] [--smoke]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from peer_server import machine

import neso._native as _native
from neso.engine.host_resources import available_cores
from neso.engine.runners.native.packing import INT8, Kind, Packer

BUFFER_BYTES = 1 << 30
SMOKE_BUFFER_BYTES = 1 << 22
INTEGER = "native int8_dynamic"

_smoke = False


def use_smoke_sizes() -> None:
    """Measure tiny sizes once: the results are meaningless, but a script finishes in seconds."""
    global _smoke
    _smoke = True


@dataclass(frozen=True)
class MachineLimits:
    """The best result of each method, using all threads.

    - bandwidths: GB/s (10^9 bytes) of reading a buffer larger than the caches
    - gemm_rates: GFLOP/s (10^9 multiplications and additions per second)
    """

    threads: int
    bandwidths: dict[str, float]
    gemm_rates: dict[str, float]

    @property
    def bandwidth(self) -> float:
        """GB/s."""
        return max(self.bandwidths.values())

    def gemm_rate(self, kind: str) -> float:
        """GFLOP/s. The rate of 8-bit integers counts only for matrices with quantized activations."""
        integers = kind == "int8_dynamic"
        return max(rate for name, rate in self.gemm_rates.items() if integers or name != INTEGER)

    def best_with(self, later: MachineLimits) -> MachineLimits:
        """Return the best of two measurements, since other virtual machines can halve the bandwidth for seconds."""
        return MachineLimits(
            self.threads,
            {name: max(value, later.bandwidths[name]) for name, value in self.bandwidths.items()},
            {name: max(value, later.gemm_rates[name]) for name, value in self.gemm_rates.items()},
        )

    def seconds(self, read_bytes: float, flops: float, kind: str) -> float:
        """Lower bound of the time for reading `read_bytes` and computing `flops`."""
        return max(read_bytes / self.bandwidth, flops / self.gemm_rate(kind)) * 1e-9


def best_seconds(function: Callable[[], object], least: float = 0.4, runs: int = 4) -> float:
    """Return the shortest duration of at least `runs` runs and at least `least` seconds, after a warm-up run.

    Other processes of a shared machine can only increase the time.
    """
    function()
    if _smoke:
        least, runs = 0.0, 1
    taken: list[float] = []
    while len(taken) < runs or sum(taken) < least:
        started = time.perf_counter()
        function()
        taken.append(time.perf_counter() - started)
    return min(taken)


def measure(threads: int | None = None, isa: str | None = None) -> MachineLimits:
    """Measure the limits. Takes about ten seconds and 1 GB of memory."""
    threads = threads or available_cores()
    isa = isa or _native.default_isa()
    rates = {f"native {kind}": _native_rate(kind, isa, threads) for kind in ("f32", "bf16", "int8_dynamic")}
    if importlib.util.find_spec("torch") is not None and not _smoke:
        rates |= {f"torch {dtype}": _torch_rate(dtype, threads) for dtype in ("bfloat16", "float32")}
    return MachineLimits(threads, _bandwidths(isa, threads), rates)


def _bandwidths(isa: str, threads: int) -> dict[str, float]:
    """Bandwidths of a plain sum and a product with one row: prefetching kernels can read faster than a sum."""
    size = SMOKE_BUFFER_BYTES if _smoke else BUFFER_BYTES
    buffer = _native.zero_pages(size)
    buffer.fill(0)  # untouched pages all map to the same zero page, which stays in the cache
    inputs = 1024
    outputs = size // (4 * inputs)
    matrix = _native.Matrix("f32", outputs, inputs, buffer)
    x, out = np.ones((1, inputs), np.float32), np.empty((1, outputs), np.float32)
    seconds = {
        "sum": best_seconds(lambda: _native.read_memory(buffer, threads), least=1.0),
        "product with a row": best_seconds(lambda: _native.matmul(matrix, x, out, isa, threads), least=1.0),
    }
    return {name: size / taken * 1e-9 for name, taken in seconds.items()}


def _native_rate(kind: str, isa: str, threads: int) -> float:
    """GFLOP/s of products whose operands fit the caches, the best of a few sizes."""
    dynamic = kind == "int8_dynamic"
    dense: Kind = "bf16" if kind == "bf16" else "f32"
    packer = Packer(dense, INT8 if dynamic else None, dynamic, threads)
    rng = np.random.default_rng(0)
    best = 0.0
    for rows, size in ((64, 512), (128, 512), (256, 1024)):
        matrix = packer.pack([rng.standard_normal((size, size), np.float32)]).native()
        x = rng.standard_normal((rows, size), np.float32)
        out = np.empty((rows, size), np.float32)
        flops = 2 * rows * size * size
        repeats = 1 if _smoke else int(1 + 1e10 / flops)
        seconds = best_seconds(lambda: _native.matmul(matrix, x, out, isa, threads, repeats))  # noqa: B023
        best = max(best, repeats * flops / seconds * 1e-9)
    return best


def _torch_rate(dtype: str, threads: int, rows: int = 1024, size: int = 4096) -> float:
    import torch

    torch.set_num_threads(threads)
    x = torch.randn(rows, size).to(getattr(torch, dtype))
    weight = torch.randn(size, size).to(x.dtype)
    with torch.inference_mode():
        seconds = best_seconds(lambda: torch.nn.functional.linear(x, weight))
    return 2 * rows * size * size / seconds * 1e-9


def describe(limits: MachineLimits) -> str:
    bandwidths = "   ".join(f"{name} {value:.1f}" for name, value in limits.bandwidths.items())
    rates = "   ".join(f"{name} {value:.0f}" for name, value in limits.gemm_rates.items())
    return (
        f"{machine()}, {limits.threads} threads\n"
        f"read   {limits.bandwidth:7.1f} GB/s      {bandwidths}\n"
        f"GEMM   {limits.gemm_rate('bf16'):7.0f} GFLOP/s   {rates}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa", choices=_native.supported_isas())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to test the script")
    arguments = parser.parse_args()
    if arguments.smoke:
        use_smoke_sizes()
    limits = measure(arguments.threads, arguments.isa)
    print(describe(limits), end="")
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(limits), indent=2) + "\n")


if __name__ == "__main__":
    main()
