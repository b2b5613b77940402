"""The LoRA adapters of a model on vLLM, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class UnknownAdapter(ValueError):
    """There is no adapter of that name. The text is that of Triton's backend."""


class Adapters:
    """Names, numbers and paths; `make(name, number, path)` gives vLLM's `LoRARequest`.

    `enabled`: whether the engine takes any.
    """

    def __init__(
        self, make: Callable[[str, int, str], Any], paths: Mapping[str, str] | None = None, *, enabled: bool
    ) -> None:
        self.enabled = enabled
        self._make = make
        self._loras: dict[str, Any] = {}
        self._next = 1
        if enabled:
            for name, path in (paths or {}).items():
                self.put(name, path)

    def paths(self) -> dict[str, str]:
        """Where each was loaded from."""
        return {name: str(lora.lora_path) for name, lora in self._loras.items()}

    def find(self, name: str) -> Any:
        """vLLM's `LoRARequest` of a name. Raises `UnknownAdapter`."""
        if not self.enabled:
            raise UnknownAdapter("LoRA feature is not enabled.")
        found = self._loras.get(name)
        if found is None:
            raise UnknownAdapter(f"LoRA {name} is not supported, we currently support {list(self._loras)}")
        return found

    def put(self, name: str, path: str) -> Any:
        """Add one, or have a name mean another from now on; requests in flight keep theirs."""
        lora = self._make(name, self._next, path)
        self._next += 1
        self._loras[name] = lora
        return lora

    def remove(self, name: str) -> Any:
        """Forget one. Raises `KeyError`."""
        return self._loras.pop(name)
