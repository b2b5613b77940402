"""Products with quantized weights relative to bfloat16, by number of rows and instruction set.

One thread multiplies the MLP of bench/checkpoint.py's `m` (2,816 x 1,024). The weights alternate within each round, and
CPU time is compared, which other load distorts less than wall time. Rounding or quantizing the inputs is included.
With --uncached, products iterate over enough copies of the weights to exceed most caches, as a decode step does.

`groups of 32` are 8-bit weights and activations with a scale for 32 inputs, as in engine directories that were built
before groups of 256: from 25 rows AMX computes them in bfloat16.

usage: python bench/quantized_products.py [--isa LEVEL ...] [--rows N ...] [--uncached] [--smoke]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
from checkpoint import SHAPES
from smoke import parse_arguments

import neso._native as _native
from neso.engine.runners.native.packing import INT4, INT8, INT8_DYNAMIC, Arena, PackedMatrix, Packer, Scheme

WEIGHTS: dict[str, tuple[Scheme | None, bool]] = {
    "bf16": (None, False),
    "int8": (INT8, False),
    "int4": (INT4, False),
    "int8_dynamic": (INT8_DYNAMIC, True),
    "groups of 32": (INT8, True),
}
"""Scheme, and whether activations are quantized, by name; the first is the baseline."""
UNCACHED_BYTES = 512 << 20


def pack(name: str, shape: dict[str, int], uncached: bool) -> list[_native.Matrix]:
    """Return copies of one matrix; the same number for each kind of weights."""
    outputs, inputs = shape["intermediate"], shape["hidden"]
    scheme, dynamic = WEIGHTS[name]
    weights = np.random.default_rng(0).standard_normal((outputs, inputs), np.float32) * 0.02
    packed = Packer("bf16", scheme, dynamic, 1).pack([weights])
    count = UNCACHED_BYTES // (2 * outputs * inputs) if uncached else 1
    arena = Arena()
    return [_copy(packed, arena).native() for _ in range(count)]


def _copy(matrix: PackedMatrix, arena: Arena) -> PackedMatrix:
    scales = None if matrix.scales is None else matrix.scales.copy()
    return replace(matrix, data=arena.copy(matrix.data, matrix.panels), scales=scales)


def seconds_per_product(
    matrices: dict[str, list[_native.Matrix]], x: np.ndarray, isa: str, least: float
) -> dict[str, float]:
    """Return the least CPU seconds of a product by weights, over `least` seconds of each."""
    best = dict.fromkeys(matrices, float("inf"))
    ends = time.process_time() + least * len(matrices)
    while True:
        for name, copies in matrices.items():
            started = time.process_time()
            _native.multiply_each(copies, x, isa, 1)
            best[name] = min(best[name], (time.process_time() - started) / len(copies))
        if time.process_time() > ends:
            return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--isa", nargs="+", choices=_native.supported_isas(), default=[_native.default_isa()])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 64, 256])
    parser.add_argument("--uncached", action="store_true", help="iterate over 512 MB of bfloat16 weights")
    parser.add_argument("--least", type=float, default=0.4, help="CPU seconds to measure each product")
    parser.add_argument("--size", choices=SHAPES, default="m")
    arguments = parse_arguments(parser, rows=[1, 16], least=0.0, size="tiny")
    matrices = {name: pack(name, SHAPES[arguments.size], arguments.uncached) for name in WEIGHTS}
    print("us per product (times as fast as bf16)")
    print(f"{'':11} {'rows':>5}" + "".join(f"{name:>20}" for name in WEIGHTS))
    for isa in arguments.isa:
        for rows in arguments.rows:
            x = np.random.default_rng(1).standard_normal((rows, SHAPES[arguments.size]["hidden"]), np.float32)
            taken = seconds_per_product(matrices, x, isa, arguments.least)
            cells = [f"{1e6 * t:.0f} ({taken['bf16'] / t:.2f})" for t in taken.values()]
            print(f"{isa:11} {rows:>5}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
