"""Options of LoRA adapters, and errors about adapters."""

from __future__ import annotations

from typing import Literal

import msgspec

from neso.engine.core.addon import RequestError


class AdapterError(RequestError):
    """An adapter cannot be loaded or found. `field`: the parameter of the request at fault."""

    def __init__(self, message: str, field: str = "lora_name") -> None:
        super().__init__(message, field)


LORA_DISABLED = "LoRA feature is not enabled."


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of LoRA. The names are vLLM's; those with `lora_cache_` are TensorRT-LLM's.

    - enable_lora: whether requests may name adapters; implied by `lora_modules`; "auto": if the runner supports it
    - lora_modules: adapters that are loaded at start, name to directory
    - max_loras: adapters in one batch; requests for others wait
    - max_lora_rank, lora_cache_max_adapter_size: limits of the rank; the smaller one applies
    - lora_cache_host_memory_bytes: limit of the memory of all loaded adapters
    - allow_runtime_lora: whether clients may load adapters from the server's disk
    - lora_cache_optimal_adapter_size, lora_cache_gpu_memory_fraction: accepted without effect: adapters are not paged
    """

    enable_lora: bool | Literal["auto"] = False
    lora_modules: dict[str, str] = {}
    max_loras: int = 8
    max_lora_rank: int = 64
    lora_cache_max_adapter_size: int | None = None
    lora_cache_host_memory_bytes: int = 1 << 30
    allow_runtime_lora: bool = False
    lora_cache_optimal_adapter_size: int | None = None
    lora_cache_gpu_memory_fraction: float | None = None

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
