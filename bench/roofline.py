"""Engine steps of a whole model in the native runner, compared to the limits of the machine (machine_limits.py).

A step must read every matrix once, and the cached keys and values of its sequences. It must compute two operations
per weight and token, and attention. Only the last token of a prompt needs logits; the other tokens need no output
matrix, and only keys and values in the last layer.

usage: python bench/roofline.py [CHECKPOINT] [--dtype bfloat16] [--quantization int8] [--threads N] [--json FILE]
           [--smoke]

CHECKPOINT: a directory, a GGUF file or a model name; default: bench/checkpoint.py's `m`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from checkpoint import write_checkpoint
from machine_limits import MachineLimits, best_seconds, describe, measure, use_smoke_sizes

from neso.engine.core.step_plan import StepPlan
from neso.engine.parallel.sharding import shard_of
from neso.engine.runners.base import CacheLayout
from neso.engine.runners.native.packed_decoder import (
    PackedDecoder,
    PackedExperts,
    PackedLayer,
    PackedMLP,
    pack_items,
)
from neso.engine.runners.native.packing import PackedMatrix
from neso.engine.runners.native.runner import NativeRunner
from neso.engine.runners.runner_options import DType, Quantization, RunnerOptions
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.registry import decoder_spec
from neso.engine.thread_placement import place_threads
from neso.engine.weights.checkpoint import open_source
from neso.engine.weights.hub import resolve_model
from neso.engine.weights.model_tensors import DecoderTensors

BLOCK = 16
CONTEXT = 64
"""Cached tokens of each decoding sequence."""


@dataclass(frozen=True)
class Phase:
    """A step of `sequences` sequences with `new` tokens each, after `cached` tokens each.

    `prompt`: in a mixed step, the tokens of one more sequence, which starts in this step; otherwise 0.
    """

    name: str
    sequences: int
    new: int
    cached: int
    prompt: int = 0

    @property
    def groups(self) -> list[tuple[int, int, int]]:
        """Sequences, new tokens and cached tokens of the decoding sequences and of the prompt."""
        return [(self.sequences, self.new, self.cached)] + [(1, self.prompt, 0)] * (self.prompt > 0)

    @property
    def num_blocks(self) -> int:
        """Number of cache blocks that the step uses."""
        return self.sequences * _blocks(self) + -(-self.prompt // BLOCK)


PHASES = (
    Phase("decode, batch 1", 1, 1, CONTEXT),
    Phase("decode, batch 16", 16, 1, CONTEXT),
    Phase("decode, batch 64", 64, 1, CONTEXT),
    Phase("decode 15, prompt 64", 15, 1, CONTEXT, 64),
    Phase("decode 63, prompt 128", 63, 1, CONTEXT, 128),
    Phase("prefill, 128 tokens", 1, 128, 0),
    Phase("prefill, 1024 tokens", 1, 1024, 0),
)
SMOKE_PHASES = (
    Phase("decode, batch 2", 2, 1, 16),
    Phase("decode 1, prompt 24", 1, 1, 16, 24),
    Phase("prefill, 32 tokens", 1, 32, 0),
)


@dataclass(frozen=True)
class Result:
    """Times in seconds; `share`: limit_seconds / seconds, 0 to 1."""

    phase: str
    seconds: float
    read_bytes: float
    flops: float
    limit_seconds: float
    share: float
    bound: str

    def line(self) -> str:
        return (
            f"{self.phase:21} {1e3 * self.seconds:9.2f} {1e-6 * self.read_bytes:9.1f} {1e-9 * self.flops:9.2f} "
            f"{1e3 * self.limit_seconds:9.2f} {100 * self.share:8.1f} %  {self.bound}"
        )


HEAD = f"{'':21} {'ms':>9} {'MB':>9} {'GFLOP':>9} {'limit ms':>9} {'of limit':>10}  bound by"


class Model:
    """A native runner, and the bytes and operations of its steps."""

    def __init__(self, path: Path, options: RunnerOptions, phases: tuple[Phase, ...]) -> None:
        self._phases = phases
        threads = place_threads(options.num_threads)
        with open_source(path) as source:
            self.spec: DecoderSpec = decoder_spec(source.config)
            items = dict(pack_items(DecoderTensors(self.spec, source), options, threads))
        self.weights = PackedDecoder.assemble(self.spec, items)
        self.runner = NativeRunner(shard_of(self.spec, options.layout), self.weights, threads)
        self.runner.allocate_cache(self.cache_layout)

    @property
    def cache_layout(self) -> CacheLayout:
        return CacheLayout(max(phase.num_blocks for phase in self._phases), BLOCK)

    @property
    def kind(self) -> str:
        """Kind of most weights, as in machine_limits."""
        matrix = _mlp(self.weights.layers[0]).down
        return "int8_dynamic" if matrix.dynamic else matrix.kind

    def read_bytes(self, phase: Phase) -> float:
        matrices = [self.weights.lm_head, *(m for layer in self.weights.layers for m in _matrices(layer))]
        weights = sum(array.nbytes for matrix in matrices for array in matrix.arrays().values())
        token = self.runner.cache_bytes_per_block(BLOCK) / BLOCK / self.spec.num_layers
        seen = (min(phase.cached, window or phase.cached) for window in self.spec.sliding_windows)
        return weights + phase.sequences * token * sum(seen)

    def flops(self, phase: Phase) -> float:
        spec = self.spec
        tokens = sum(sequences * new for sequences, new, _ in phase.groups)
        sampled = sum(sequences for sequences, _, _ in phase.groups)
        *layers, last = self.weights.layers
        matrices = tokens * sum(_size(matrix) for layer in layers for matrix in _matrices(layer))
        matrices += tokens * _size(last.qkv) + sampled * sum(map(_size, _matrices(last)[1:]))
        matrices += sampled * _size(self.weights.lm_head)
        pairs = 0
        for sequences, new, cached in phase.groups:
            keys = cached + 1 + np.arange(new)
            seen = sum(np.minimum(keys, window or keys).sum() for window in spec.sliding_windows[:-1])
            pairs += sequences * (seen + min(keys[-1], spec.sliding_windows[-1] or keys[-1]))
        return float(2 * matrices + 4 * spec.num_heads * spec.head_dim * pairs)

    def seconds(self, phase: Phase) -> float:
        """Seconds of the step. Repetitions overwrite the same cache slots."""
        plan = self.plan(phase)
        return best_seconds(lambda: self.runner.step(plan), least=1.0, runs=5)

    def fill(self, runner: NativeRunner | None = None) -> None:
        """Write the keys that the phases read: untouched pages all map to the same zero page."""
        runner = runner or self.runner
        phase = max((p for p in self._phases if p.cached), key=lambda p: p.sequences)
        blocks = _blocks(phase)
        for first in range(0, phase.sequences, 8):
            part = Phase("fill", min(8, phase.sequences - first), phase.cached, 0)
            runner.step(self.plan(part, blocks, first * blocks))

    def plan(self, phase: Phase, width: int | None = None, first_block: int = 0) -> StepPlan:
        """Plan the step. Block tables start at `first_block`; `width`: blocks per sequence, by default those in use."""
        width = width or _blocks(phase)
        new = [count for sequences, count, _ in phase.groups for _ in range(sequences)]
        cached = [count for sequences, _, count in phase.groups for _ in range(sequences)]
        starts = np.cumsum([0, *new], dtype=np.int32)
        ids = np.random.default_rng(0).integers(6, self.spec.vocab_size, starts[-1])
        # The rows of decoding sequences have unused entries at the end if the prompt has more blocks.
        columns = max(width, -(-phase.prompt // BLOCK))
        tables = np.arange(len(new))[:, None] * width + np.arange(columns)
        last = max(phase.num_blocks, len(new) * width) - 1
        return StepPlan(
            step=1,
            sequence_ids=np.arange(len(new), dtype=np.int32),
            token_ids=ids.astype(np.int32),
            query_start=starts,
            num_computed=np.array(cached, np.int32),
            block_tables=(np.minimum(tables, last) + first_block).astype(np.int32),
            block_copies=np.empty((0, 2), np.int32),
            logits_rows=starts[1:] - np.int32(1),
        )


def _blocks(phase: Phase) -> int:
    """Number of blocks of each sequence except the prompt of a mixed step."""
    return -(-(phase.cached + phase.new) // BLOCK)


def _mlp(layer: PackedLayer) -> PackedMLP:
    if isinstance(layer.mlp, PackedExperts):
        raise SystemExit(
            "models with experts are not supported: which weights a step reads depends on its tokens"
        )
    return layer.mlp


def _matrices(layer: PackedLayer) -> list[PackedMatrix]:
    mlp = _mlp(layer)
    return [layer.qkv, layer.output, *([mlp.gate] if mlp.gate else []), mlp.up, mlp.down]


def _size(matrix: PackedMatrix) -> int:
    return matrix.outputs * matrix.inputs


def result_of(model: Model, phase: Phase, seconds: float, limits: MachineLimits) -> Result:
    read, flops = model.read_bytes(phase), model.flops(phase)
    limit = limits.seconds(read, flops, model.kind)
    bound = "memory" if limits.seconds(read, 0, model.kind) == limit else "arithmetic"
    return Result(phase.name, seconds, read, flops, limit, limit / seconds, bound)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--dtype", choices=get_args(DType), default="auto")
    parser.add_argument("--quantization", choices=[q for q in get_args(Quantization) if q != "fp8"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny model and steps, to test the script")
    arguments = parser.parse_args()
    phases = SMOKE_PHASES if arguments.smoke else PHASES
    if arguments.smoke:
        use_smoke_sizes()
    options = RunnerOptions(arguments.dtype, arguments.quantization, arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.checkpoint is None:
            write_checkpoint(Path(folder), "tiny" if arguments.smoke else "m")
        path = resolve_model(arguments.checkpoint) if arguments.checkpoint else Path(folder)
        model = Model(path, options, phases)
    before = measure(arguments.threads)
    model.fill()
    seconds = [model.seconds(phase) for phase in phases]
    limits = before.best_with(measure(arguments.threads))
    found = [result_of(model, phase, taken, limits) for phase, taken in zip(phases, seconds, strict=True)]
    print(f"{describe(limits)}{model.kind} weights, {model.runner.isa} kernels\n{HEAD}")
    for result in found:
        print(result.line())
    if arguments.json:
        report = {"limits": asdict(limits), "kind": model.kind, "results": [asdict(r) for r in found]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
