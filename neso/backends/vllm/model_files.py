"""What the version's folder of a model says of its engine: `model.json` and `multi_lora.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neso.backends.option_files import read_object, resolve_generation_config, resolve_relative
from neso.models import SHIPPED_MODELS
from neso.server.errors import InvalidArgument

_PATHS = ("model", "tokenizer", "speculative_model")
"""Arguments that name a checkpoint: on the hub, or a folder, which may be one within the version's."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`arguments`: of vLLM's engine, as the file has them. `adapters`: names and paths of LoRA adapters."""

    arguments: dict[str, Any]
    adapters: dict[str, str]

    @classmethod
    def read(cls, version_directory: Path) -> ModelFiles:
        """Read the files. Without `model`, the version's folder is the checkpoint. Raises `InvalidArgument`."""
        path = version_directory / "model.json"
        if not path.is_file() and not (version_directory / "config.json").is_file():
            raise InvalidArgument(
                f"there is no {path.name} in the version's folder '{version_directory.name}': it holds the arguments "
                'of vLLM\'s engine, such as {"model": "facebook/opt-125m"}'
            )
        arguments = read_object(path)
        arguments.setdefault("model", str(version_directory))
        for name in _PATHS:
            if isinstance(arguments.get(name), str):
                arguments[name] = _found(version_directory, arguments[name])
        if isinstance(source := arguments.get("generation_config"), str):
            arguments["generation_config"] = resolve_generation_config(source, version_directory)
        adapters = read_object(version_directory / "multi_lora.json")
        for name, place in adapters.items():
            if not isinstance(place, str) or not place:
                raise InvalidArgument(
                    f"multi_lora.json: the path of '{name}' must be a string, got {place!r}"
                )
            adapters[name] = _found(version_directory, place)
        return cls(arguments, adapters)


def _found(directory: Path, name: str) -> str:
    """A path within the version's folder, if there is one; a model that ships with Neso; else what it was."""
    if name and (found := resolve_relative(name, directory)) is not None:
        return str(found)
    return str(SHIPPED_MODELS.get(name, name))


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
