"""Speed of this machine with the native kernels: memory bandwidth and matrix-product rates.

They limit a language model: a decode step of one sequence reads all weights, a prefill computes with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import neso._native as _native
from neso.engine.runners.native.packing import INT8_DYNAMIC, Kind, Packer

BUFFER_BYTES = 1 << 30
"""Larger than the caches."""
_INPUTS = 1024
_SIZES = ((64, 512), (128, 512), (256, 1024))  # rows, inputs and outputs; they fit the caches


def best_seconds(function: Callable[[], object], least: float = 0.4, runs: int = 4) -> float:
    """Return the shortest duration of at least `runs` runs and at least `least` seconds, after a warm-up run.

    Other processes of a shared machine can only increase the time.
    """
    function()
    taken: list[float] = []
    while len(taken) < runs or sum(taken) < least:
        started = time.perf_counter()
        function()
        taken.append(time.perf_counter() - started)
    return min(taken)


def bandwidths(isa: str, threads: int, size: int = BUFFER_BYTES, least: float = 1.0) -> dict[str, float]:
    """Return GB/s (10^9 bytes) of a plain sum and of a product with one row, over `size` bytes.

    Prefetching kernels can read faster than a sum. `least`: seconds to measure each.
    """
    buffer = _native.zero_pages(size)
    buffer.fill(0)  # untouched pages all map to the same zero page, which stays in the cache
    outputs = size // (4 * _INPUTS)
    matrix = _native.Matrix("f32", outputs, _INPUTS, buffer)
    x, out = np.ones((1, _INPUTS), np.float32), np.empty((1, outputs), np.float32)
    reads: dict[str, Callable[[], object]] = {
        "sum": lambda: _native.read_memory(buffer, threads),
        "product with a row": lambda: _native.matmul(matrix, x, out, isa, threads),
    }
    return {name: size / best_seconds(read, least) * 1e-9 for name, read in reads.items()}


def matmul_rate(kind: str, isa: str, threads: int, operations: float = 1e10, least: float = 0.4) -> float:
    """Return GFLOP/s of products whose operands fit the caches, the best of a few sizes.

    `kind`: f32, bf16 or int8_dynamic. `operations`: about that many are computed in a run; `least`: see `best_seconds`.
    """
    dynamic = kind == "int8_dynamic"
    dense: Kind = "bf16" if kind == "bf16" else "f32"
    packer = Packer(dense, INT8_DYNAMIC if dynamic else None, dynamic, threads)
    rng = np.random.default_rng(0)
    best = 0.0
    for rows, size in _SIZES:
        matrix = packer.pack([rng.standard_normal((size, size), np.float32)]).native()
        x = rng.standard_normal((rows, size), np.float32)
        out = np.empty((rows, size), np.float32)
        flops = 2 * rows * size * size
        repeats = int(1 + operations / flops)
        seconds = best_seconds(lambda: _native.matmul(matrix, x, out, isa, threads, repeats), least)  # noqa: B023
        best = max(best, repeats * flops / seconds * 1e-9)
    return best
