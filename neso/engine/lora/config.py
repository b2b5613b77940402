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
    """Whether and how many adapters an engine takes; the names are vLLM's, those with `lora_cache_` TensorRT-LLM's.

    - enable_lora: without it no request may name an adapter; `lora_modules` switches it on; "auto": where the runner
      can apply them
    - lora_modules: name to directory of the adapters that are loaded at the start
    - max_loras: adapters in one batch; requests for others wait
    - max_lora_rank, lora_cache_max_adapter_size: the largest rank; the smaller one counts
    - lora_cache_host_memory_bytes: memory of the adapters that are loaded, in use or not
    - allow_runtime_lora: whether clients of the server may load adapters from its disk
    - lora_cache_optimal_adapter_size, lora_cache_gpu_memory_fraction: accepted; there are no pages for them to size
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
