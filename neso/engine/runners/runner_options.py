"""Options of runners. The module is fast to import, for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from neso.engine.parallel.layout import SINGLE_RANK, RankLayout
from neso.engine.thread_placement import ThreadBinding

DType = Literal["auto", "float32", "float16", "bfloat16"]
Quantization = Literal["int8", "int4", "int8_dynamic", "fp8"]
AttentionBackendName = Literal["auto", "triton", "flashinfer", "flash_attn"]


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Precision of weights, CPU threads, attention.

    - dtype: of weights and activations; "auto": the checkpoint's
    - quantization: of matrices that are dense in the checkpoint; None: not quantized
    - num_threads: of a CPU runner; None: see `available_cores`
    - thread_binding: of a native runner, see `place_threads`
    - max_attention_window_size, sink_token_length: see `limit_attention`
    - attention_backend: of the torch runner on a GPU; "auto": the Triton kernel
    - max_cuda_graph_batch: number of sequences of the largest decode step that is captured as a CUDA graph; 0 for none
    - block_size: number of tokens of a KV-cache block, on which attention backends depend
    - lora_slots, max_lora_rank: number of adapters that a step may use, and their largest rank. A runner that reserves
      memory for them rejects others; the rest ignore the options
    - layout: the part of the model that this process holds; all of it by default
    """

    dtype: DType = "auto"
    quantization: Quantization | None = None
    num_threads: int | None = None
    thread_binding: ThreadBinding = "auto"
    max_attention_window_size: int | list[int] | None = None
    sink_token_length: int = 0
    attention_backend: AttentionBackendName = "auto"
    block_size: int = 16
    max_cuda_graph_batch: int = 1024
    lora_slots: int = 0
    max_lora_rank: int = 0
    layout: RankLayout = SINGLE_RANK


DEFAULT_OPTIONS = RunnerOptions()


class UnsupportedOption(ValueError):
    """The runner does not support an option or its value."""


def reject_thread_binding(options: RunnerOptions) -> None:
    """Raises `UnsupportedOption` if threads should be bound to CPUs: only native runners can."""
    if options.thread_binding != "auto":
        raise UnsupportedOption(f"thread_binding: {options.thread_binding} needs the native runner; use auto")
