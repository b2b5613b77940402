"""Options of TensorRT-LLM's repository layout, and the flags of `neso repo init` that set them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

import typer

PANEL = "Layout trtllm"


def _option(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=PANEL, **settings)


class SchedulerPolicy(str, Enum):
    """`batch_scheduler_policy` of tensorrt_llm."""

    max_utilization = "max_utilization"
    guaranteed_no_evict = "guaranteed_no_evict"


@dataclass(frozen=True, kw_only=True)
class TrtllmOptions:
    """Options of the layout's models.

    - model, draft_model, tokenizer: absolute paths or Hugging Face names
    - max_batch_size: 0 for requests without a batch dimension
    - kv_cache_tokens, kv_cache_free_gpu_mem_fraction: KV-cache limits; None: the engine's defaults
    - parameters: additional `parameters` of tensorrt_llm, by name
    """

    model: str
    tokenizer: Annotated[str, _option(help="Tokenizer directory. Default: that of MODEL.")]
    decoupled: Annotated[bool, _option(help="Allow any number of responses to a request (streaming).")] = True
    max_batch_size: Annotated[
        int, _option(min=0, help="Maximum batch size of a request (0 = no batch dimension).")
    ] = 64
    instances: Annotated[
        int, _option(min=1, help="Number of instances of preprocessing and postprocessing.")
    ] = 1
    batch_scheduler_policy: Annotated[
        SchedulerPolicy, _option(help="Scheduler policy that decides when requests start.")
    ] = SchedulerPolicy.max_utilization
    max_beam_width: Annotated[int, _option(min=1, help="Maximum beam width.")] = 1
    kv_cache_tokens: Annotated[
        int | None,
        _option(min=1, help="Size of the KV cache in tokens (max_tokens_in_paged_kv_cache)."),
    ] = None
    kv_cache_free_gpu_mem_fraction: Annotated[
        float | None, _option(min=0, max=1, help="Fraction of the free memory for the KV cache.")
    ] = None
    enable_chunked_context: Annotated[
        bool, _option(help="Prefill long prompts in chunks, beside other requests.")
    ] = True
    exclude_input_in_output: Annotated[
        bool,
        _option("--exclude-input-in-output", help="Exclude the prompt from the output by default."),
    ] = False
    accumulate_tokens: Annotated[
        bool,
        _option(
            "--accumulate-tokens",
            help="Stream the whole text with each response of tensorrt_llm_bls, not only the new text.",
        ),
    ] = False
    draft_model: Annotated[
        str | None, _option(help="Checkpoint of the draft model, served as tensorrt_llm_draft.")
    ] = None
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    parameters: Mapping[str, str] = field(default_factory=dict)
