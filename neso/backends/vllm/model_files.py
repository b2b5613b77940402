"""Files in the version folder (`model.json`, `multi_lora.json`), and the LoRA adapter registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from neso.backends.option_files import read_object, resolve_generation_config, resolve_relative
from neso.models import SHIPPED_MODELS
from neso.server.errors import InvalidArgument

_PATHS = ("model", "tokenizer", "speculative_model")
"""Arguments that name a checkpoint: a Hugging Face name, or a path that can be relative to the version folder."""


@dataclass(frozen=True, slots=True)
class Supervision:
    """Neso's own options in `model.json`, named as those of its engine. Times are in seconds.

    `max_restarts`: failures in `restart_window` that are followed by a restart. `step_timeout`: an engine that answers
    nothing for this long is killed; it answers between two steps. 0 disables this check.
    """

    max_restarts: int = 10
    restart_window: float = 300.0
    step_timeout: float = 600.0

    @classmethod
    def take(cls, arguments: dict[str, Any]) -> Supervision:
        """Remove the options from engine arguments. Raises `InvalidArgument`."""
        given: dict[str, Any] = {}
        for each in fields(cls):
            if each.name not in arguments:
                continue
            value = arguments.pop(each.name)
            types = int if each.name == "max_restarts" else int | float
            if isinstance(value, bool) or not isinstance(value, types) or value < 0:
                kind = "an integer" if types is int else "a number"
                raise InvalidArgument(
                    f"model.json: '{each.name}' must be {kind} of at least 0, got {value!r}"
                )
            given[each.name] = value
        return cls(**given)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`arguments`: engine arguments of `model.json`. `adapters`: paths of LoRA adapters by name."""

    arguments: dict[str, Any]
    adapters: dict[str, str]
    supervision: Supervision = field(default_factory=Supervision)

    @classmethod
    def read(cls, version_directory: Path) -> ModelFiles:
        """Read the files. Without `model`, the version folder is the checkpoint. Raises `InvalidArgument`."""
        path = version_directory / "model.json"
        if not path.is_file() and not (version_directory / "config.json").is_file():
            raise InvalidArgument(
                f"there is no {path.name} in the version's folder '{version_directory.name}', expected a JSON object "
                'of engine arguments, such as {"model": "facebook/opt-125m"}'
            )
        arguments = read_object(path)
        supervision = Supervision.take(arguments)
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
        return cls(arguments, adapters, supervision)


def _found(directory: Path, name: str) -> str:
    """Resolve a path in the version folder, or the name of a shipped model; other names are unchanged."""
    if name and (found := resolve_relative(name, directory)) is not None:
        return str(found)
    return str(SHIPPED_MODELS.get(name, name))


class UnknownAdapter(ValueError):
    """There is no adapter with this name. The message is the same as in Triton's backend."""


class Adapters:
    """LoRA adapters by name. `make(name, number, path)` creates vLLM's `LoRARequest`.

    `enabled`: whether the engine supports LoRA.
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
        """Adapter paths by name."""
        return {name: str(lora.lora_path) for name, lora in self._loras.items()}

    def find(self, name: str) -> Any:
        """Return the `LoRARequest` of an adapter. Raises `UnknownAdapter`."""
        if not self.enabled:
            raise UnknownAdapter("LoRA feature is not enabled.")
        found = self._loras.get(name)
        if found is None:
            raise UnknownAdapter(f"LoRA {name} is not supported, we currently support {list(self._loras)}")
        return found

    def put(self, name: str, path: str) -> Any:
        """Add or replace an adapter. Requests in flight keep using the old adapter."""
        lora = self._make(name, self._next, path)
        self._next += 1
        self._loras[name] = lora
        return lora

    def remove(self, name: str) -> Any:
        """Remove an adapter. Raises `KeyError`."""
        return self._loras.pop(name)
