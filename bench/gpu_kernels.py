"""Compile the Triton kernels for GPUs that this machine need not have; print what each kernel needs.

Runs steps of the torch runner on the CPU with a driver that compiles kernels and does not run them. The steps differ in
their numbers of sequences, tokens and blocks, as those of a server do; that must not compile more variants of a kernel
than the kinds of steps need. Products with quantized matrices are compiled alone, for the numbers of rows that have
tiles of their own. With all models, no kernel is left out; one that is not compiled is named. ptxas and cuobjdump come
with Triton.

usage: python bench/gpu_kernels.py [--targets 80,90,100] [--models NAME,...] [--steps N] [--json FILE] [--smoke]
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import pkgutil
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# Triton reads it when kernels are imported; interpreted kernels are not compiled.
os.environ.pop("TRITON_INTERPRET", None)
# Steps run on the CPU on any machine: a GPU would capture graphs of kernels that do not run.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import torch
import triton
from gpu_model import BLOCK_SIZE, RandomWeights
from smoke import parse_arguments
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import JITFunction
from triton.runtime.driver import driver

from neso.engine.core.step_plan import StepPlan
from neso.engine.lora.adapter import LoraPlan
from neso.engine.runners import torch as torch_runner
from neso.engine.runners.base import CacheLayout
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.runners.torch.grouped_weights import CodeFormat, GroupedWeights
from neso.engine.runners.torch.linears import ExpertMatrices
from neso.engine.runners.torch.runner import TorchRunner
from neso.engine.runners.torch.sampling import sampling_parameters
from neso.engine.runners.torch.triton_experts import assign_tiles
from neso.engine.runners.torch.triton_operations import TritonOperations, round_rows
from neso.engine.runners.torch.triton_quantized import (
    MAX_PRODUCT_ROWS,
    dequantize,
    multiply,
    multiply_experts,
)
from neso.engine.runners.torch.triton_sampling import sample
from neso.engine.runners.torch.weights import Experts
from neso.engine.sampling.token_sampling import SamplingBatch
from neso.engine.spec_decode.draft import NO_SLOT_COPIES, DraftTreePlan
from neso.engine.specs.registry import decoder_spec

# Layers as wide as those of known models, with a small MLP and vocabulary, which do not change the kernels.
SMALL = {
    "vocab_size": 512,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "num_hidden_layers": 1,
}


def _model(
    architecture: str, kind: str, hidden: int, heads: int, kv_heads: int, **fields: Any
) -> dict[str, Any]:
    return {
        **SMALL,
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **fields,
    }


MODELS = {
    "Llama 3 8B": _model("LlamaForCausalLM", "llama", 4096, 32, 8),
    "Llama 3 70B": _model("LlamaForCausalLM", "llama", 8192, 64, 8),
    "Llama 3.2 1B": _model("LlamaForCausalLM", "llama", 2048, 32, 8),
    "Qwen 3 0.6B": _model("Qwen3ForCausalLM", "qwen3", 1024, 16, 8, head_dim=128),
    "Phi 3 mini": _model("Phi3ForCausalLM", "phi3", 3072, 32, 32, sliding_window=2047),
    "Gemma 2 9B": _model(
        "Gemma2ForCausalLM",
        "gemma2",
        3584,
        16,
        8,
        head_dim=256,
        num_hidden_layers=2,
        sliding_window=4096,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "Mixtral 8x7B": _model("MixtralForCausalLM", "mixtral", 4096, 32, 8, num_local_experts=8),
    "Qwen 3 30B A3B": _model(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        2048,
        32,
        4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=128,
        norm_topk_prob=True,
    ),
}

QUANTIZED = "quantized matrices"
"""In the place of a model: the products with matrices of each format."""
FORMATS: tuple[tuple[CodeFormat, int, bool], ...] = (
    ("int4", 128, True),
    ("int8", 32, False),
    ("e4m3", 128, False),
)
"""Codes, inputs of a group, whether groups have offsets: as in AWQ, Q8_0 of GGUF, and block-wise float8."""
MIN_FLOAT8 = 89
"""The lowest compute capability, times 10, that multiplies float8; activations are rounded only from there on."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled variant: registers and bytes of stack (spills) per thread, bytes of shared memory per block."""

    model: str
    target: int
    name: str
    registers: int
    stack: int
    shared: int
    warps: int


class CompilingDriver(DriverBase):
    """Device `i` is a GPU with compute capability `targets[i]` / 10. Launches do nothing."""

    def __init__(self, targets: list[int]) -> None:
        super().__init__()
        self.targets, self.device, self.model = targets, 0, ""
        self.kernels: list[Kernel] = []
        self._warps = 0

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.targets[self.device], 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    @property
    def utils(self) -> CompilingDriver:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the shared memory that a thread block may have (CUDA Programming Guide, compute capabilities)."""
        kilobytes = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
        return {"max_shared_mem": kilobytes.get(self.targets[device], 99) * 1024}

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        self._warps = metadata.num_warps
        return lambda *arguments: None

    def load_binary(
        self, name: str, cubin: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Note the resources of a kernel. Triton calls it once per variant, after `launcher_cls`."""
        registers, stack = _usage(cubin)
        self.kernels.append(
            Kernel(self.model, self.targets[device], name, registers, stack, shared, self._warps)
        )
        return 0, 0, registers, stack, 1024


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def make_plan(news: list[int], contexts: list[int], tree: bool = False) -> StepPlan:
    """Plan of sequences with `news` new tokens after `contexts` tokens, with logits of their last tokens."""
    starts = np.cumsum([0, *news]).astype(np.int32)
    blocks = max(-(-(new + context) // BLOCK_SIZE) for new, context in zip(news, contexts, strict=True))
    plan = StepPlan(
        step=1,
        sequence_ids=np.arange(len(news), dtype=np.int32),
        token_ids=np.zeros(starts[-1], np.int32),
        query_start=starts,
        num_computed=np.array(contexts, np.int32),
        block_tables=np.zeros((len(news), blocks), np.int32),
        block_copies=np.empty((0, 2), np.int32),
        logits_rows=starts[1:] - 1,
    )
    if not tree:
        return plan
    nodes = np.concatenate([np.arange(new) for new in news])
    masks = (np.uint64(2) << nodes.astype(np.uint64)) - np.uint64(1)
    return plan.with_part(DraftTreePlan(NO_SLOT_COPIES, masks, nodes.astype(np.int32)))


def kinds_of_steps() -> list[StepPlan]:
    """One step of each kind: decodes, prefill, both, a tree of draft tokens, few and many tokens with adapters."""
    plans = [make_plan([1] * 4, [64] * 4), make_plan([64, 64], [0, 16]), make_plan([1, 64], [64, 0])]
    adapted = [with_adapters(make_plan(news, [0, 16])) for news in ([64, 64], [200, 200])]
    return [*plans, make_plan([4, 4], [64, 80], tree=True), *adapted]


def with_adapters(plan: StepPlan) -> StepPlan:
    """Give two thirds of the sequences one of two adapters."""
    return plan.with_part(LoraPlan(np.arange(plan.num_sequences, dtype=np.int32) % 3 - 1))


def random_steps(count: int) -> list[StepPlan]:
    random = np.random.default_rng(0)
    plans = []
    for _ in range(count):
        sequences = int(random.integers(1, 12))
        news = np.where(random.random(sequences) < 0.5, 1, random.integers(1, 50, sequences)).tolist()
        plan = make_plan(news, random.integers(0, 500, sequences).tolist())
        plans.append(with_adapters(plan) if random.random() < 0.5 else plan)
    return plans


def compile_model(compiling: CompilingDriver, config: dict[str, Any], steps: int) -> int:
    """Compile the kernels of a model for the current device; return how many more variants random steps compiled."""
    operations = TritonOperations(multiplies_float8=compiling.targets[compiling.device] >= MIN_FLOAT8)
    options = RunnerOptions("bfloat16", lora_slots=2, max_lora_rank=64)
    loaded = TorchRunner.load(decoder_spec(config), RandomWeights(config), options)
    runner = TorchRunner(loaded.shard, replace(loaded._decoder, operations=operations), loaded.device)
    runner.allocate_cache(CacheLayout(64, BLOCK_SIZE))
    for plan in kinds_of_steps():
        runner.step(plan)
    for layer in loaded._decoder.weights.layers:
        if isinstance(layer.mlp, Experts):
            compile_float8_experts(operations, layer.mlp, config["hidden_size"])
        elif operations.multiplies_float8:
            round_rows(torch.zeros(4, config["hidden_size"], dtype=torch.bfloat16))
    for rows in (1, 7):
        compile_sampling(rows, config["vocab_size"])
    needed = len(compiling.kernels)
    for plan in random_steps(steps):
        runner.step(plan)
    return len(compiling.kernels) - needed


def compile_float8_experts(operations: TritonOperations, experts: Experts, hidden: int) -> None:
    """Compile the kernels of experts whose matrices are float8."""
    gate_up, down = (
        ExpertMatrices(part.values.to(torch.float8_e4m3fn), torch.ones(part.values.shape[:2]))
        for part in (experts.gate_up, experts.down)
    )
    x, chosen = torch.zeros(4, hidden, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.int64)
    operations.experts(x, Experts(experts.router, gate_up, down, None), chosen, torch.ones(4, 2), "silu")


def compile_quantized(compiling: CompilingDriver) -> int:
    """Compile the products with quantized matrices; return how many more variants other numbers of rows compiled."""
    multiplies_float8 = compiling.targets[compiling.device] >= MIN_FLOAT8
    for rows in (1, 100, 300):
        multiply_rows(rows, multiplies_float8)
    needed = len(compiling.kernels)
    for rows in (2, 16, 17, 256, 257, 512):
        multiply_rows(rows, multiplies_float8)
    return len(compiling.kernels) - needed


def multiply_rows(rows: int, multiplies_float8: bool) -> None:
    """Multiply rows by a matrix of each format, and by those of two experts.

    The inputs of a matrix of eight chunks are split among programs, those of a single chunk are not.
    """
    outputs = 256
    bias = torch.zeros(outputs, dtype=torch.bfloat16)
    for codes, group_size, has_offsets in FORMATS:
        rounded = multiplies_float8 and codes == "e4m3"
        for chunks in (8, 1):
            weights = zero_weights(codes, group_size, has_offsets, outputs, chunks)
            x = torch.zeros(rows, weights.inputs, dtype=torch.bfloat16)
            if rows > MAX_PRODUCT_ROWS and not rounded:
                dequantize(weights, x.dtype)
            else:
                multiply(x, weights, bias, rounded)
        out = x.new_empty(2 * rows, outputs // 2)
        tiles = assign_tiles(torch.zeros(rows, 2, dtype=torch.int64), 2)
        multiply_experts(x, weights, tiles, out, rounded)


def zero_weights(
    codes: CodeFormat, group_size: int, has_offsets: bool, outputs: int, chunks: int
) -> GroupedWeights:
    """Return weights of which each chunk is a group."""
    width = group_size // 2 if codes == "int4" else group_size
    scales = torch.zeros(chunks, outputs, dtype=torch.float32 if codes == "e4m3" else torch.float16)
    return GroupedWeights(
        codes,
        torch.zeros(chunks, outputs, width, dtype=torch.uint8),
        scales,
        scales.clone() if has_offsets else None,
        chunk=group_size,
        group_size=group_size,
        inputs=chunks * group_size,
    )


def compile_sampling(rows: int, vocab: int) -> None:
    """Compile the kernel that draws a token for each row."""
    draws = SamplingBatch.of([(1.0, 0, 0.9, 0.0, 0.5)] * rows)
    sample(torch.zeros(rows, vocab), *sampling_parameters(draws, torch.device("cpu")))


def launched_kernels() -> set[str]:
    """Return the names of the kernels of the Triton modules, without those that only other kernels call."""
    kernels: set[str] = set()
    called: set[str] = set()
    for module in pkgutil.iter_modules(torch_runner.__path__, f"{torch_runner.__name__}."):
        if not module.name.rpartition(".")[2].startswith("triton_"):
            continue
        for name, kernel in vars(importlib.import_module(module.name)).items():
            if isinstance(kernel, JITFunction):
                kernels.add(name)
                nodes = ast.walk(kernel.parse())
                called |= {
                    n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
                }
    return kernels - called


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--targets", default="80,90,100", help="compute capabilities, times 10")
    parser.add_argument("--models", default=",".join([*MODELS, QUANTIZED]), help="comma-separated names")
    parser.add_argument("--steps", type=int, default=200, help="random steps per model")
    parser.add_argument("--json", type=Path)
    arguments = parse_arguments(parser, targets="90", models="Qwen 3 0.6B", steps=10)
    targets = [int(target) for target in arguments.targets.split(",")]
    compiling = CompilingDriver(targets)
    driver.set_active(compiling)
    print(f"Triton {triton.__version__}; registers and stack bytes per thread, shared memory per block")
    added: dict[str, int] = {}
    for device, target in enumerate(targets):
        compiling.device = device
        for name in arguments.models.split(","):
            compiling.model = name
            before = len(compiling.kernels)
            added[f"{name}, sm_{target}"] = (
                compile_quantized(compiling)
                if name == QUANTIZED
                else compile_model(compiling, MODELS[name], arguments.steps)
            )
            print_kernels(compiling.kernels[before:])
    print()
    for model, count in added.items():
        print(f"{model}: {count} more variants in random steps or with other numbers of rows")
    left_out = {
        target: sorted(launched_kernels() - {k.name for k in compiling.kernels if k.target == target})
        for target in targets
    }
    for target, names in left_out.items():
        print(f"sm_{target}: not compiled: {', '.join(names) or 'none'}")
    if arguments.json:
        kernels = [asdict(kernel) for kernel in compiling.kernels]
        found = {"kernels": kernels, "added": added, "left_out": left_out}
        arguments.json.write_text(json.dumps(found, indent=1))


def print_kernels(kernels: list[Kernel]) -> None:
    for kernel, count in Counter(kernels).items():
        print(
            f"{kernel.model:12} sm_{kernel.target:<4}{kernel.name:14} {kernel.warps:2} warps "
            f"{kernel.registers:4} registers {kernel.stack:4} stack {kernel.shared / 1024:6.1f} KiB  x{count}",
            flush=True,
        )


if __name__ == "__main__":
    main()
