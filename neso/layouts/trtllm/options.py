"""What people fill into the configurations of the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class SchedulerPolicy(str, Enum):
    """`batch_scheduler_policy` of the model tensorrt_llm."""

    max_utilization = "max_utilization"
    guaranteed_no_evict = "guaranteed_no_evict"


@dataclass(frozen=True, kw_only=True)
class TrtllmOptions:
    """Settings of the five models.

    `model`, `draft_model`, `tokenizer`: absolute paths, or names on the hub. `max_batch_size` 0: requests have no batch
    dimension. `instances`: of preprocessing and of postprocessing. `kv_cache_tokens` and
    `kv_cache_free_gpu_mem_fraction` limit the key-value cache; None leaves that to the engine. `parameters`: more of
    tensorrt_llm's, by their names.
    """

    model: str
    tokenizer: str
    draft_model: str | None = None
    decoupled: bool = True
    max_batch_size: int = 64
    instances: int = 1
    batch_scheduler_policy: SchedulerPolicy = SchedulerPolicy.max_utilization
    max_beam_width: int = 1
    kv_cache_tokens: int | None = None
    kv_cache_free_gpu_mem_fraction: float | None = None
    enable_chunked_context: bool = True
    exclude_input_in_output: bool = False
    accumulate_tokens: bool = False
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    parameters: Mapping[str, str] = field(default_factory=dict)
