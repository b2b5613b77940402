"""Each native kernel, compared to the limits of the machine (machine_limits.py).

Products have the shape of the MLP of bench/checkpoint.py's `m`. With few rows they iterate over enough copies of the
matrix to exceed the caches, as a decode step iterates over layers. The time of attention is the difference between
steps of a 16-layer decoder with all keys and with a window of one token. Small kernels run on one thread with data in
the cache; sampling reads its logits from memory.

"of limit" is the lower bound of the time, for reading the weights or keys once and for the arithmetic, divided by the
measured time. Takes a minute and prints the results at the end.

`--only torch` compares bfloat16 products with torch's (oneDNN), at the shapes of `m` and alternating, by the CPU time
of one thread, which other load distorts less than wall time (several threads would also count their waiting). Ours
includes rounding the float32 inputs to bfloat16 and has float32 outputs; torch's has bfloat16 inputs and outputs.

usage: python bench/kernels.py [--only gemm|attention|small|torch ...] [--isa LEVEL] [--threads N] [--json FILE]
           [--smoke]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from checkpoint import SHAPES
from machine_limits import MachineLimits, best_seconds, describe, measure, use_smoke_sizes

import neso._native as _native
from neso.engine.host_resources import available_cores
from neso.engine.runners.native.packing import INT4, INT8, INT8_DYNAMIC, Arena, Kind, PackedMatrix, Packer

Call = Callable[[], object]

ROWS = (1, 4, 16, 64, 256, 1024)
KINDS = ("f32", "bf16", "int8", "int4", "int8_dynamic")
SCHEMES = {"int8": INT8, "int4": INT4, "int8_dynamic": INT8_DYNAMIC}
UNCACHED_BYTES = 144 << 20
# From this number of rows, products are compute-bound, and iterating over all copies would take seconds.
MANY_ROWS, FEW_COPIES = 256, 4

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 16, 16, 4, 64, 16
# (new tokens per sequence, sequences, cached tokens per sequence)
ATTENTION = ((1, 1, 8192), (1, 16, 512), (1, 64, 128), (128, 1, 0), (1024, 1, 0), (512, 1, 2048))
CACHED_TOKENS = 64 * 144
TORCH_ROWS = (128, 256, 512, 1024)
SMOKE_ATTENTION = ((1, 4, 128), (128, 1, 0))


@dataclass(frozen=True)
class Result:
    """One measurement; `read_bytes` and `flops` are lower bounds.

    - kind: kind of the operands, as in machine_limits; None if no limit applies
    - share: lower bound of the time / measured time, 0 to 1
    - ratio: time of torch / measured time; None if they were not compared
    """

    kernel: str
    case: str
    seconds: float
    read_bytes: float
    flops: float
    kind: str | None = None
    share: float | None = None
    ratio: float | None = None

    def against(self, limits: MachineLimits) -> Result:
        if self.kind is None:
            return self
        return replace(self, share=limits.seconds(self.read_bytes, self.flops, self.kind) / self.seconds)

    def line(self) -> str:
        share = "" if self.share is None else f"{100 * self.share:6.1f} % of limit"
        if self.ratio is not None:
            share = f"{self.ratio:6.2f} x torch's speed"
        rates = f"{self.read_bytes / self.seconds * 1e-9:8.1f} GB/s {self.flops / self.seconds * 1e-9:8.1f} GFLOP/s"
        return f"{self.kernel:22} {self.case:30} {1e6 * self.seconds:11.2f} us {rates} {share}".rstrip()


@dataclass(frozen=True)
class Bench:
    isa: str
    threads: int
    smoke: bool

    def gemm(self) -> Iterator[Result]:
        shape = SHAPES["tiny" if self.smoke else "m"]
        outputs, inputs = shape["intermediate"], shape["hidden"]
        for kind in KINDS:
            packed = _copies(_pack(kind, outputs, inputs, self.threads), 1 if self.smoke else UNCACHED_BYTES)
            matrices = [matrix.native() for matrix in packed]
            weight_bytes = _bytes(packed[0])
            for rows in ROWS[:2] if self.smoke else ROWS:
                seconds = self._product_seconds(matrices, rows, inputs)
                case = f"{outputs} x {inputs}, {rows} rows"
                yield Result(f"gemm {kind}", case, seconds, weight_bytes, 2.0 * rows * outputs * inputs, kind)

    def _product_seconds(self, matrices: list[_native.Matrix], rows: int, inputs: int) -> float:
        x = np.random.default_rng(0).standard_normal((rows, inputs), np.float32)
        used = matrices[:FEW_COPIES] if rows >= MANY_ROWS else matrices
        # One pass per call takes milliseconds, so that starting the threads is negligible.
        seconds = best_seconds(lambda: _native.multiply_each(used, x, self.isa, self.threads), runs=10)
        return seconds / len(used)

    def attention(self) -> Iterator[Result]:
        for kind in ("bf16", "f32"):
            decoder = AttentionOnly(kind, self.isa, self.threads)
            for new, sequences, cached in SMOKE_ATTENTION if self.smoke else ATTENTION:
                seconds = decoder.seconds(new, sequences, cached) / LAYERS
                keys = sequences * (cached + new)
                read = keys * 2.0 * KV_HEADS * HEAD_DIM * (2 if kind == "bf16" else 4)
                pairs = sequences * (new * cached + new * (new + 1) / 2)
                case = f"{sequences} x {new} new on {cached}"
                flops = 4.0 * HEADS * HEAD_DIM * pairs
                yield Result(f"attention {kind}", case, seconds, read, flops, kind)

    def torch(self) -> Iterator[Result]:
        """Our products on one thread; `ratio` is torch's time / our time."""
        shape = SHAPES["tiny" if self.smoke else "m"]
        hidden, intermediate = shape["hidden"], shape["intermediate"]
        head_dim = hidden // shape["heads"]
        shapes = {
            "qkv": (hidden + 2 * shape["kv_heads"] * head_dim, hidden),
            "output": (hidden, hidden),
            "gate and up": (2 * intermediate, hidden),
            "down": (hidden, intermediate),
        }
        for name, (outputs, inputs) in shapes.items():
            matrix = _pack("bf16", outputs, inputs, 1).native()
            for rows in TORCH_ROWS[:1] if self.smoke else TORCH_ROWS:
                flops = 2.0 * rows * outputs * inputs
                repeats = 1 if self.smoke else int(1 + 1e10 / flops)
                x = np.random.default_rng(0).standard_normal((rows, inputs), np.float32)
                ours, theirs = _alternate(
                    lambda: _native.multiply_each([matrix], x, self.isa, 1, repeats),  # noqa: B023
                    _torch_product(rows, outputs, inputs, repeats),
                    1 if self.smoke else 12,
                )
                case = f"{outputs} x {inputs}, {rows} rows"
                read = 2.0 * outputs * inputs
                seconds = ours / repeats
                yield Result(f"{name}, CPU time", case, seconds, read, flops, ratio=theirs / ours)

    def small(self, width: int = 2816) -> Iterator[Result]:
        rng, isa = np.random.default_rng(0), self.isa
        x, weight, out = rng.standard_normal((3, width)).astype(np.float32)
        both, head = np.concatenate([x, weight]), x[:HEAD_DIM].copy()
        cos, sin = np.ones(HEAD_DIM // 2, np.float32), np.zeros(HEAD_DIM // 2, np.float32)
        one, matrix = cos[:1], _pack("bf16", 1024, width, 1).native()
        calls: dict[str, tuple[Call, int]] = {
            "rms_norm": (lambda: _native.rms_norm(x, weight, 1e-5, out, isa), 8 * width),
            "gated silu": (lambda: _native.gated("silu", both, out, isa), 8 * width),
            "gated gelu_tanh": (lambda: _native.gated("gelu_tanh", both, out, isa), 8 * width),
            "rotate": (lambda: _native.rotate(head, cos, sin, isa), 8 * HEAD_DIM),
            "matrix_row bf16": (lambda: _native.matrix_row(matrix, 77, out, isa), 2 * width),
        }
        # The overhead of a call from Python, measured with an almost empty kernel.
        empty = self._seconds_per_call(lambda: _native.rotate(head, one, one, isa))
        for name, (call, read) in calls.items():
            case = f"{HEAD_DIM if name == 'rotate' else width} floats"
            yield Result(name, case, max(self._seconds_per_call(call) - empty, 1e-9), read, 0)
        yield from self._choice()

    def _seconds_per_call(self, call: Call) -> float:
        calls = 10 if self.smoke else 2000
        return best_seconds(lambda: [call() for _ in range(calls)], least=0.05) / calls

    def _choice(self, rows: int = 64, vocab: int = 32000) -> Iterator[Result]:
        decoder = _decoder("f32", self.isa, self.threads, _tiny_weights(0, vocab), vocab)
        rng = np.random.default_rng(0)
        # Different rows for each call, so that they are read from memory.
        parts = rng.standard_normal((8, rows, vocab), np.float32)
        ones, none, tokens = np.ones(rows, np.float32), np.zeros(rows, np.float32), np.empty(rows, np.int32)
        no_masks = np.empty(0, np.int32), np.empty((0, 0), np.int32)
        kinds = {
            "greedy": (none, ones),
            "temperature": (ones, ones),
            "top-p 0.9": (ones, ones * np.float32(0.9)),
        }
        for name, (heat, top_p) in kinds.items():
            draw = (heat, tokens * 0, top_p, none, rng.uniform(size=rows), tokens, *no_masks)
            seconds = best_seconds(lambda: [decoder.choose(part, *draw) for part in parts]) / len(parts)  # noqa: B023
            yield Result(f"choose {name}", f"{rows} x {vocab}", seconds, rows * vocab * 4, 0, "f32")


class AttentionOnly:
    """A decoder with tiny matrices and a configurable window."""

    def __init__(self, kind: str, isa: str, threads: int) -> None:
        self._weights = {window: _tiny_weights(window, 16) for window in (0, 1)}
        self._decoder = _decoder(kind, isa, threads, self._weights[1], 16)
        self._decoder.allocate_cache(CACHED_TOKENS // BLOCK, BLOCK)
        # Untouched pages all map to the same zero page, which stays in the cache.
        for start in range(0, CACHED_TOKENS, 1024):
            self._step(1024, 1, start)

    def seconds(self, new: int, sequences: int, cached: int) -> float:
        """Seconds of attention in all layers."""
        taken = {}
        for window, weights in self._weights.items():
            self._decoder.set_weights(weights)
            taken[window] = best_seconds(lambda: self._step(new, sequences, cached))
        return taken[0] - taken[1]

    def _step(self, new: int, sequences: int, cached: int) -> None:
        tokens, blocks = new * sequences, -(-(cached + new) // BLOCK)
        self._decoder.step(
            np.ones(tokens, np.int32),
            np.arange(0, tokens + 1, new, dtype=np.int32),
            np.full(sequences, cached, np.int32),
            np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks),
            np.empty((0, 2), np.int32),
            np.arange(tokens, dtype=np.int32),
            [(np.ones((tokens, HEAD_DIM // 2), np.float32), np.zeros((tokens, HEAD_DIM // 2), np.float32))],
            np.empty((tokens, 16), np.float32),
            np.empty((0, 32), np.float32),
            np.empty(0, np.int32),
            np.empty((0, 32), np.float32),
            np.empty((0, 3), np.int32),
            np.empty(0, np.int32),
            np.empty(0, np.uint64),
        )


def _decoder(kind: str, isa: str, threads: int, weights: _native.Weights, vocab: int) -> _native.Decoder:
    sizes = {"vocab_size": vocab, "hidden_size": 32, "norm_eps": 1e-5}
    heads = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    how = {"activation": "silu", "cache_kind": kind, "isa": isa, "threads": threads}
    return _native.Decoder(weights=weights, attention_scale=HEAD_DIM**-0.5, **sizes, **heads, **how)


def _tiny_weights(window: int, vocab: int) -> _native.Weights:
    norms = {name: np.ones(32, np.float32) for name in ("attention_norm", "mlp_norm", "final_norm")}
    qkv = _pack("f32", (HEADS + 2 * KV_HEADS) * HEAD_DIM, 32, 1).native()
    output = _pack("f32", 32, HEADS * HEAD_DIM, 1).native()
    square = _pack("f32", 32, 32, 1).native()
    mlp = _native.Mlp(square, square, square)
    layers = [_native.Layer(norms, qkv, output, mlp, None, window, 0) for _ in range(LAYERS)]
    return _native.Weights(layers, norms, _pack("f32", vocab, 32, 1).native(), None, "f32", None)


def _torch_product(rows: int, outputs: int, inputs: int, repeats: int) -> Call:
    """Return a function that computes a product `repeats` times on one thread."""
    import torch

    torch.set_num_threads(1)
    x, weight = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()

    def multiply() -> None:
        with torch.inference_mode():
            for _ in range(repeats):
                torch.nn.functional.linear(x, weight)

    return multiply


def _alternate(ours: Call, theirs: Call, rounds: int) -> tuple[float, float]:
    """Return the least CPU seconds of each call after a warm-up."""
    best = [float("inf")] * 2
    for round_number in range(rounds + 1):
        for index, call in enumerate((ours, theirs)):
            started = time.process_time()
            call()
            if round_number:
                best[index] = min(best[index], time.process_time() - started)
    return best[0], best[1]


def _pack(kind: str, outputs: int, inputs: int, threads: int) -> PackedMatrix:
    dense: Kind = "bf16" if kind == "bf16" else "f32"
    weights = np.random.default_rng(0).standard_normal((outputs, inputs), np.float32) * 0.02
    return Packer(dense, SCHEMES.get(kind), kind == "int8_dynamic", threads).pack([weights])


def _copies(matrix: PackedMatrix, total_bytes: int) -> list[PackedMatrix]:
    """Return copies with a total size of at least `total_bytes`."""
    arena, count = Arena(), total_bytes // _bytes(matrix) + 1
    scales = [None if matrix.scales is None else matrix.scales.copy() for _ in range(count)]
    return [replace(matrix, data=arena.copy(matrix.data, matrix.panels), scales=copied) for copied in scales]


def _bytes(matrix: PackedMatrix) -> int:
    return sum(array.nbytes for array in matrix.arrays().values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("gemm", "attention", "small", "torch"))
    parser.add_argument("--isa", choices=_native.supported_isas(), default=_native.default_isa())
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to test the script")
    arguments = parser.parse_args()
    if arguments.smoke:
        use_smoke_sizes()
    before, bench = measure(arguments.threads), Bench(arguments.isa, arguments.threads, arguments.smoke)
    has_torch = importlib.util.find_spec("torch") is not None
    parts = arguments.only or ("gemm", "attention", "small", *(["torch"] if has_torch else []))
    measured = [result for part in parts for result in getattr(bench, part)()]
    limits = before.best_with(measure(arguments.threads))
    results = [result.against(limits) for result in measured]
    print(f"{describe(limits)}{arguments.isa} kernels")
    for result in results:
        print(result.line())
    if arguments.json:
        report = {"limits": asdict(limits), "isa": arguments.isa, "results": [asdict(r) for r in results]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
