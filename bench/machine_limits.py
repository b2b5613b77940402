"""Measures memory bandwidth and matrix product rates of this machine, the limits that other benchmarks compare to.

usage: python bench/machine_limits.py [--threads N] [--isa LEVEL] [--json FILE] [--smoke]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peer_server import machine

import neso._native as _native
from neso.engine.diagnostics import machine_speed
from neso.engine.diagnostics.machine_speed import bandwidths, matmul_rate
from neso.engine.host_resources import available_cores

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
    """Return the duration that `machine_speed.best_seconds` measures; with smoke sizes, of a single run."""
    return machine_speed.best_seconds(function, 0.0 if _smoke else least, 1 if _smoke else runs)


def measure(threads: int | None = None, isa: str | None = None) -> MachineLimits:
    """Measure the limits. Takes about ten seconds and 1 GB of memory."""
    threads = threads or available_cores()
    isa = isa or _native.default_isa()
    size: dict[str, Any] = {"size": SMOKE_BUFFER_BYTES, "least": 0.0} if _smoke else {}
    work: dict[str, Any] = {"operations": 0.0, "least": 0.0} if _smoke else {}
    rates = {
        f"native {kind}": matmul_rate(kind, isa, threads, **work) for kind in ("f32", "bf16", "int8_dynamic")
    }
    if importlib.util.find_spec("torch") is not None and not _smoke:
        rates |= {f"torch {dtype}": _torch_rate(dtype, threads) for dtype in ("bfloat16", "float32")}
    return MachineLimits(threads, bandwidths(isa, threads, **size), rates)


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
