"""The torch runner on a GPU: decode compared to memory bandwidth, prefill compared to the GEMM rate.

A Llama with the shape of 8 B parameters and random weights. Compares the torch runner (Triton kernels, CUDA graphs),
the same spec in plain torch operations, and transformers' model with its cache.

usage: python bench/gpu_llama.py [--shape 8b|tiny] [--quantization fp8|int8|int4] [--batches 1,16,64,256]
           [--context 512] [--prefill 1024,8192] [--json FILE] [--smoke]

`--smoke` runs a tiny shape, also on a CPU, to test the script.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import transformers

from neso import __version__
from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.base import CacheLayout
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.runners.torch.operations import PlainOperations
from neso.engine.runners.torch.runner import TorchRunner
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.source import TensorSource

BLOCK_SIZE = 16
_smoke = False
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


class RandomWeights(TensorSource):
    """Random bfloat16 weights, cut from one pool of random numbers."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.directory, self.config = Path("random"), config
        pool = np.random.default_rng(0).standard_normal(1 << 22, np.float32) * 0.02
        self._pool = pool.astype(ml_dtypes.bfloat16)

    def __contains__(self, name: str) -> bool:
        return not name.endswith("bias")

    def matrix(self, name: str, shape: tuple[int, int]) -> np.ndarray:
        return np.resize(self._pool, shape)

    def read_float32(self, name: str, target: np.ndarray) -> None:
        target[...] = 1.0

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        raise NotImplementedError

    def close(self) -> None: ...


@dataclass(frozen=True)
class Limits:
    """Measured limits of the device: read bandwidth in GB/s, bfloat16 matrix products in TFLOP/s."""

    bandwidth: float
    gemm: float


def seconds(function: Callable[[], object], runs: int = 20) -> float:
    """Median seconds of a call, including the execution on the device."""
    if _smoke:
        runs = 1
    for _ in range(3):
        function()
    synchronize()
    taken = []
    for _ in range(runs):
        started = time.perf_counter()
        function()
        synchronize()
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_limits(device: torch.device) -> Limits:
    size, width = (1 << 32, 8192) if device.type == "cuda" else (1 << 26, 512)
    memory = torch.zeros(size // 4, dtype=torch.float32, device=device)
    bandwidth = size / seconds(memory.sum) / 1e9
    matrix = torch.randn(width, width, dtype=torch.bfloat16, device=device)
    return Limits(bandwidth, 2 * width**3 / seconds(lambda: matrix @ matrix) / 1e12)


def plan(batch: int, new_tokens: int, context: int, step: int = 1) -> StepPlan:
    """Plan of `batch` sequences with `new_tokens` each, after `context` tokens, with logits of their last tokens."""
    blocks = -(-(context + new_tokens) // BLOCK_SIZE)
    starts = np.arange(batch + 1, dtype=np.int32) * new_tokens
    return StepPlan(
        step=step,
        sequence_ids=np.arange(batch, dtype=np.int32),
        token_ids=np.arange(batch * new_tokens, dtype=np.int32) % 500,
        query_start=starts,
        num_computed=np.full(batch, context, np.int32),
        block_tables=np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks),
        block_copies=np.empty((0, 2), np.int32),
        logits_rows=starts[1:] - 1,
    )


def matrix_parameters(spec: DecoderSpec) -> int:
    """Number of matrix weights used per token, including the LM head."""
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    return spec.num_layers * (attention + mlp) + spec.vocab_size * spec.hidden_size


def run_transformers(
    config: dict[str, Any], device: torch.device, batch: int, new: int, context: int
) -> float:
    """Seconds of a decode step of transformers' model after `context` tokens, or of a prefill if `context` is 0."""
    fields = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    with torch.device(device):
        model_config = transformers.LlamaConfig(**fields, attn_implementation="sdpa")
        model = transformers.LlamaForCausalLM(model_config).to(torch.bfloat16).eval()
    with torch.inference_mode():
        if not context:
            prompt = torch.ones(batch, new, dtype=torch.long, device=device)
            return seconds(lambda: model(prompt, use_cache=True, logits_to_keep=1), runs=5)
        cache = transformers.DynamicCache(config=model_config)
        model(
            torch.ones(batch, context, dtype=torch.long, device=device),
            past_key_values=cache,
            logits_to_keep=1,
        )
        token = torch.ones(batch, 1, dtype=torch.long, device=device)
        return seconds(lambda: model(token, past_key_values=cache), runs=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--quantization", choices=["fp8", "int8", "int4"])
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prefill", default="1024,8192")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny shape and single runs, to test the script")
    arguments = parser.parse_args()
    if arguments.smoke:
        global _smoke
        _smoke = True
        arguments.shape, arguments.batches, arguments.context, arguments.prefill = "tiny", "1,2", 16, "32"
    batches = [int(size) for size in arguments.batches.split(",")]
    prefills = [int(size) for size in arguments.prefill.split(",")]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": max(8192, *prefills),
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        **SHAPES[arguments.shape],
    }
    spec = decoder_spec(config)
    source = RandomWeights(config)
    runner = TorchRunner.load(spec, source, RunnerOptions("bfloat16", arguments.quantization))
    plain = TorchRunner(
        runner.shard, dataclasses.replace(runner._decoder, operations=PlainOperations()), runner.device
    )
    limits = measure_limits(runner.device)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{name}; Neso {__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"limits: {limits.bandwidth:.0f} GB/s, {limits.gemm:.1f} TFLOP/s; context {arguments.context}")
    blocks = max(max(batches) * (-(-arguments.context // BLOCK_SIZE) + 2), -(-max(prefills) // BLOCK_SIZE))
    runner.allocate_cache(CacheLayout(blocks, BLOCK_SIZE))
    # Share the cache, but without CUDA graphs.
    plain._cache = runner._cache
    report = Report(spec, limits, runner.cache_bytes_per_block(BLOCK_SIZE), arguments.quantization)
    for batch in batches:
        step = plan(batch, 1, arguments.context)
        report.decode("neso", batch, arguments.context, seconds(lambda p=step: runner.step(p)))
        report.decode("plain torch", batch, arguments.context, seconds(lambda p=step: plain.step(p), runs=5))
        theirs = run_transformers(config, runner.device, batch, 1, arguments.context)
        report.decode("transformers", batch, arguments.context, theirs)
    for tokens in prefills:
        step = plan(1, tokens, 0)
        report.prefill("neso", tokens, seconds(lambda p=step: runner.step(p), runs=5))
        report.prefill("plain torch", tokens, seconds(lambda p=step: plain.step(p), runs=5))
        report.prefill("transformers", tokens, run_transformers(config, runner.device, 1, tokens, 0))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"device": name, "limits": limits.__dict__, "rows": report.rows}, indent=1)
        )


class Report:
    """Prints and collects measurements."""

    def __init__(
        self, spec: DecoderSpec, limits: Limits, bytes_per_block: int, quantization: str | None
    ) -> None:
        self._spec, self._limits, self._bytes_per_block = spec, limits, bytes_per_block
        self._bytes_per_weight = {None: 2.0, "fp8": 1.0, "int8": 8.5 / 8, "int4": 4.5 / 8}[quantization]
        self.rows: list[dict[str, Any]] = []

    def decode(self, name: str, batch: int, context: int, taken: float) -> None:
        weight = 2 if name == "transformers" else self._bytes_per_weight
        read = matrix_parameters(self._spec) * weight
        read += batch * -(-context // BLOCK_SIZE) * self._bytes_per_block
        share = read / taken / 1e9 / self._limits.bandwidth
        print(
            f"decode {batch:4}  {name:12} {1e3 * taken:8.2f} ms  {batch / taken:9.0f} tok/s  "
            f"{100 * share:5.1f} % of the bandwidth",
            flush=True,
        )
        self.rows.append({"phase": "decode", "name": name, "batch": batch, "seconds": taken, "share": share})

    def prefill(self, name: str, tokens: int, taken: float) -> None:
        # The LM head is applied to the last token only.
        head = self._spec.vocab_size * self._spec.hidden_size
        flops = 2 * (matrix_parameters(self._spec) - head) * tokens
        share = flops / taken / 1e12 / self._limits.gemm
        print(
            f"prefill {tokens:5} {name:12} {1e3 * taken:8.2f} ms  {tokens / taken:9.0f} tok/s  "
            f"{100 * share:5.1f} % of the GEMM rate",
            flush=True,
        )
        self.rows.append(
            {"phase": "prefill", "name": name, "tokens": tokens, "seconds": taken, "share": share}
        )


if __name__ == "__main__":
    main()
