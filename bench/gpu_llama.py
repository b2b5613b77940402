"""The torch runner on a GPU: decode compared to memory bandwidth, prefill compared to the GEMM rate.

A Llama with the shape of 8 B parameters and random weights. Compares the torch runner (Triton kernels, CUDA graphs)
with transformers' model and its cache, with the same spec in plain torch operations, and quantized weights with
bfloat16. The logits of the kernels are compared with those of the plain operations.

usage: python bench/gpu_llama.py [--shape 8b|tiny] [--layers N] [--quantizations fp8 int8 int4]
           [--batches 1 16 64 256] [--context 512] [--prefill 1024 8192] [--json FILE] [--smoke]

`--layers`: by default what fits into the memory of the GPU. `--smoke` runs a tiny shape, also on a CPU, to test the
script.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_model import (
    BLOCK_SIZE,
    CLOSE,
    SHAPES,
    RandomWeights,
    check_close,
    fill_cache,
    layers_that_fit,
    llama_config,
    logits_of,
    plan,
    release,
    seconds,
)
from smoke import exit_missing, parse_arguments
from torch import Tensor

from neso import __version__
from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.base import CacheLayout
from neso.engine.runners.runner_options import Quantization, RunnerOptions
from neso.engine.runners.torch.operations import PlainOperations
from neso.engine.runners.torch.runner import TorchRunner
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.registry import decoder_spec

BYTES_PER_WEIGHT = {"bfloat16": 2.0, "fp8": 1.0, "int8": 8.5 / 8, "int4": 4.5 / 8}
# With float8, a small difference can round an activation to the next of few numbers.
MAX_ERROR = {"bfloat16": CLOSE, "fp8": 3 * CLOSE, "int8": CLOSE, "int4": CLOSE}
CHUNK = 1024
NESO, PLAIN, TRANSFORMERS = "neso", "plain torch", "transformers"


@dataclass(frozen=True)
class Limits:
    """Measured limits of the device: read bandwidth in GB/s, bfloat16 matrix products in TFLOP/s."""

    bandwidth: float
    gemm: float


@dataclass(frozen=True)
class Work:
    """Steps to measure: decodes of `batches` sequences after `context` tokens, prefills of one sequence."""

    batches: list[int]
    context: int
    prefills: list[int]
    runs: int

    @property
    def cache(self) -> CacheLayout:
        decode = max(self.batches) * (-(-self.context // BLOCK_SIZE) + 2)
        return CacheLayout(max(decode, -(-max(self.prefills) // BLOCK_SIZE)), BLOCK_SIZE)


def measure_limits(device: torch.device) -> Limits:
    size, width = (1 << 32, 8192) if device.type == "cuda" else (1 << 26, 512)
    memory = torch.zeros(size // 4, dtype=torch.float32, device=device)
    bandwidth = size / seconds(memory.sum) / 1e9
    matrix = torch.randn(width, width, dtype=torch.bfloat16, device=device)
    return Limits(bandwidth, 2 * width**3 / seconds(lambda: matrix @ matrix) / 1e12)


def matrix_parameters(spec: DecoderSpec) -> tuple[int, int]:
    """Return the number of matrix weights of all layers, and of the LM head."""
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    return spec.num_layers * (attention + mlp), spec.vocab_size * spec.hidden_size


def measure_neso(
    config: dict[str, Any], quantization: Quantization | None, work: Work, report: Report
) -> None:
    """Measure the torch runner, and for dense weights also the same spec in plain torch operations."""
    weights = quantization or "bfloat16"
    options = RunnerOptions("bfloat16", quantization)
    runner = TorchRunner.load(decoder_spec(config), RandomWeights(config), options)
    plain = TorchRunner(
        runner.shard, dataclasses.replace(runner._decoder, operations=PlainOperations()), runner.device
    )
    runner.allocate_cache(work.cache)
    fill_cache(runner)
    # The same cache, but without CUDA graphs.
    plain._cache = runner._cache

    def run_plain(steps: list[StepPlan]) -> Tensor:
        return [logits_of(plain, step) for step in steps][-1]

    steps = [("decode", batch, plan(batch, 1, work.context)) for batch in work.batches]
    steps += [("prefill", tokens, plan(1, tokens, 0)) for tokens in work.prefills]
    for phase, size, step in steps:
        plain_steps = [step] if phase == "decode" else chunks(size)
        found, expected = logits_of(runner, step), run_plain(plain_steps)
        error = check_close(f"{weights}, {phase} {size}", found, expected, MAX_ERROR[weights])
        runs = work.runs if phase == "decode" else min(work.runs, 5)
        taken = seconds(lambda step=step: runner.step(step), runs)
        report.add(phase, NESO, size, taken, weights, error)
        if quantization is None:
            taken = seconds(lambda steps=plain_steps: run_plain(steps), min(runs, 5), warm_ups=1)
            report.add(phase, PLAIN, size, taken)


def chunks(tokens: int) -> list[StepPlan]:
    """Return the steps of a prefill in chunks: the masks and scores of plain torch operations would not fit at once."""
    return [plan(1, min(CHUNK, tokens - start), start) for start in range(0, tokens, CHUNK)]


def measure_transformers(config: dict[str, Any], device: torch.device, work: Work, report: Report) -> None:
    """Measure transformers' model: decode steps with its cache, and prefills."""
    # Lazy: slow to import.
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    spec = decoder_spec(config)
    fields = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    # Created in bfloat16, because in float32 the model would need twice the memory.
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model_config = LlamaConfig(**fields, attn_implementation="sdpa")
            model = LlamaForCausalLM(model_config).eval()
    finally:
        torch.set_default_dtype(torch.float32)

    def ones(batch: int, tokens: int) -> Tensor:
        return torch.ones(batch, tokens, dtype=torch.long, device=device)

    for batch in work.batches:
        cache = DynamicCache(config=model_config)
        for layer in range(spec.num_layers):
            shape = (batch, spec.num_kv_heads, work.context, spec.head_dim)
            keys, values = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
            cache.update(keys, values, layer)
        token = ones(batch, 1)
        taken = seconds(lambda token=token, cache=cache: model(token, past_key_values=cache), work.runs)
        report.add("decode", TRANSFORMERS, batch, taken)
        del cache, keys, values
        release()
    for tokens in work.prefills:
        prompt = ones(1, tokens)
        taken = seconds(
            lambda prompt=prompt: model(prompt, use_cache=True, logits_to_keep=1), min(work.runs, 5)
        )
        report.add("prefill", TRANSFORMERS, tokens, taken)


class Report:
    """Prints and collects measurements."""

    def __init__(self, spec: DecoderSpec, limits: Limits, context: int) -> None:
        self._layers, self._head = matrix_parameters(spec)
        self._limits, self._context = limits, context
        self._cache_bytes = 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        phase: str,
        name: str,
        size: int,
        taken: float,
        weights: str = "bfloat16",
        error: float | None = None,
    ) -> None:
        """Add the seconds of a step. size: sequences of a decode, tokens of a prefill; error: see `check_close`."""
        if phase == "decode":
            # The LM head is not quantized.
            read = self._layers * BYTES_PER_WEIGHT[weights] + 2 * self._head
            read += size * self._context * self._cache_bytes
            share, limit = read / taken / 1e9 / self._limits.bandwidth, "bandwidth"
        else:
            # The LM head is applied to the last token only.
            share = 2 * self._layers * size / taken / 1e12 / self._limits.gemm
            limit = "GEMM rate"
        ratios = [
            f"{ratio:.2f} times {other}"
            for other, ratio in (
                (TRANSFORMERS, self.ratio(phase, TRANSFORMERS, size, taken) if name == NESO else None),
                ("bfloat16", self.ratio(phase, NESO, size, taken) if weights != "bfloat16" else None),
            )
            if ratio is not None
        ]
        checked = [] if error is None else [f"error {error:.4f}"]
        print(
            f"{phase:7} {size:5}  {name:12} {weights:8} {1e3 * taken:8.2f} ms  {size / taken:9.0f} tok/s  "
            f"{100 * share:5.1f} % of the {limit:9}  {', '.join(ratios + checked)}",
            flush=True,
        )
        row = {"phase": phase, "name": name, "weights": weights, "size": size, "seconds": taken}
        self.rows.append(row | {"share": share, "error": error})

    def ratio(self, phase: str, name: str, size: int, taken: float) -> float | None:
        """Return how much longer the named implementation took with bfloat16; None if it was not measured."""
        for row in self.rows:
            if (row["phase"], row["name"], row["weights"], row["size"]) == (phase, name, "bfloat16", size):
                return float(row["seconds"]) / taken
        return None

    def headline(self) -> str:
        """Return the throughput of the largest decode and prefill of each kind of weights, relative to others."""
        found = []
        for phase in ("decode", "prefill"):
            size = max(row["size"] for row in self.rows if row["phase"] == phase)
            for row in self.rows:
                if row["name"] == NESO and (row["phase"], row["size"]) == (phase, size):
                    other = TRANSFORMERS if row["weights"] == "bfloat16" else NESO
                    ratio = self.ratio(phase, other, size, row["seconds"])
                    against = TRANSFORMERS if row["weights"] == "bfloat16" else "bfloat16"
                    found.append(f"{phase} {size} {row['weights']}: {ratio:.2f} times as fast as {against}")
        return "; ".join(found)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--quantizations", nargs="*", choices=["fp8", "int8", "int4"], default=[])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prefill", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--json", type=Path)
    small = {"shape": "tiny", "layers": 2, "batches": [1, 2], "context": 16, "prefill": [32]}
    arguments = parse_arguments(parser, **small)
    gpu = torch.cuda.is_available()
    if not gpu and not arguments.smoke:
        exit_missing("torch finds no GPU: see docs/guides/gpu.md")
    device = torch.device("cuda" if gpu else "cpu")
    work = Work(arguments.batches, arguments.context, arguments.prefill, 1 if arguments.smoke else 20)
    layers = arguments.layers or (layers_that_fit() if arguments.shape == "8b" else None)
    config = llama_config(arguments.shape, layers, max(8192, *arguments.prefill))
    spec = decoder_spec(config)
    limits = measure_limits(device)
    release()
    name = torch.cuda.get_device_name() if gpu else "CPU"
    print(
        f"{name}; Neso {__version__}, torch {torch.__version__}; {spec.num_layers} layers of {arguments.shape}"
    )
    print(f"limits: {limits.bandwidth:.0f} GB/s, {limits.gemm:.1f} TFLOP/s; context {work.context}")
    report = Report(spec, limits, work.context)
    measure_transformers(config, device, work, report)
    release()
    quantizations: list[Quantization | None] = [None, *arguments.quantizations]
    for quantization in quantizations:
        measure_neso(config, quantization, work, report)
        release()
    print(f"headline: {report.headline()}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"device": name, "limits": limits.__dict__, "rows": report.rows}, indent=1)
        )


if __name__ == "__main__":
    main()
