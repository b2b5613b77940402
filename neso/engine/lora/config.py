"""LoRA options and adapter errors."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from neso.engine.core.addon import RequestError


class AdapterError(RequestError):
    """An adapter cannot be loaded or found. `field`: the invalid request parameter."""

    def __init__(self, message: str, field: str = "lora_name") -> None:
        super().__init__(message, field)


LORA_DISABLED = "LoRA feature is not enabled."


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA options, named as in vLLM and, with the prefix `lora_cache_`, as in TensorRT-LLM.

    The descriptions are the help texts of the options.
    """

    enable_lora: Annotated[
        bool | Literal["auto"],
        Meta(description="Enable LoRA adapters; auto enables them if the runner supports them."),
    ] = False
    lora_modules: Annotated[
        dict[str, str], Meta(description="Adapters to load at the start, by name; enables LoRA.")
    ] = {}
    max_loras: Annotated[
        int, Meta(description="Maximum number of adapters in a step; requests for others wait.")
    ] = 8
    max_lora_rank: Annotated[int, Meta(description="Maximum rank of an adapter.")] = 64
    lora_cache_max_adapter_size: Annotated[
        int | None, Meta(description="Maximum rank of an adapter, if it is lower than max_lora_rank.")
    ] = None
    lora_cache_host_memory_bytes: Annotated[
        int, Meta(description="Memory for loaded adapters, in bytes.")
    ] = 1 << 30
    allow_runtime_lora: Annotated[
        bool, Meta(description="Allow clients of the server to load adapters from its disk.")
    ] = False
    lora_cache_optimal_adapter_size: Annotated[
        int | None, Meta(description="Accepted for compatibility, without effect.")
    ] = None
    lora_cache_gpu_memory_fraction: Annotated[
        float | None, Meta(description="Accepted for compatibility, without effect.")
    ] = None

    def __post_init__(self) -> None:
        for name in ("max_loras", "max_lora_rank", "lora_cache_host_memory_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def enabled(self) -> bool:
        return bool(self.enable_lora or self.lora_modules)

    @property
    def largest_rank(self) -> int:
        return min(self.max_lora_rank, self.lora_cache_max_adapter_size or self.max_lora_rank)
