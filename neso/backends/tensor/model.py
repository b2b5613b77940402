"""Interface for authors of tensor backends: `TensorModel`, its instance and parameters."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import numpy.typing as npt

from neso.server.backend import ModelContext
from neso.server.config.model_config import parse_bool
from neso.server.errors import InvalidArgument

Arrays = dict[str, npt.NDArray[Any]]
Loaded = TypeVar("Loaded")


class InstanceKind(str, Enum):
    """Device kind of an instance: `kind` of its instance group."""

    CPU = "CPU"
    GPU = "GPU"
    MODEL = "MODEL"
    """The model decides."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a model. `device`: GPU number; 0 for other kinds."""

    name: str
    kind: InstanceKind
    device: int = 0


class TensorModel(ABC):
    """One instance of a model. Created and used in a separate thread, so its methods can block.

    `parameters`: parameters of the configuration, with the settings of the backend (`--backend-config`) as defaults.
    A raised `ServerError` is sent to the client; other exceptions are sent as internal errors with their text.
    """

    def __init__(self, context: ModelContext, instance: Instance) -> None:
        self.context = context
        self.instance = instance
        self.parameters = Parameters(context.config, context.backend_config)

    def load(self) -> None:  # noqa: B027  optional
        """Load the model from `context.version_directory`. An exception makes the model UNAVAILABLE."""

    @abstractmethod
    def run(self, inputs: Arrays) -> Arrays:
        """Execute a batch and return the outputs by name.

        Inputs have the configured datatypes (strings: object arrays of `bytes`) and the shapes `dims`, or `reshape`;
        with `max_batch_size` > 0, [rows of all requests, *dims]. Optional inputs can be missing. Inputs are read-only.

        Every configured output must be returned with its datatype (strings: `bytes` or `str`) and, with
        `max_batch_size` > 0, as many rows as the inputs. Other outputs are dropped.
        """

    def unload(self) -> None:  # noqa: B027  optional
        """Release the resources of `load`. Also called after a failed `load`."""


class Parameters(Mapping[str, str]):
    """The `parameters` of a configuration by name. `defaults`: values of parameters that are not set."""

    def __init__(self, config: Any, defaults: Mapping[str, str] | None = None) -> None:
        self._model: str = config.name
        self._values = dict(defaults or {})
        self._values.update((name, value.string_value) for name, value in config.parameters.items())

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def integer(self, name: str, default: int) -> int:
        """Return an integer parameter. Raises `InvalidArgument` if the value is not an integer."""
        text = self._values.get(name)
        try:
            return default if text is None else int(text)
        except ValueError:
            raise self._invalid(name, "an integer") from None

    def boolean(self, name: str, default: bool) -> bool:
        """Return a boolean parameter. Raises `InvalidArgument` if the value is not a boolean."""
        text = self._values.get(name)
        if text is None:
            return default
        value = parse_bool(text)
        if value is None:
            raise self._invalid(name, "true or false")
        return value

    def _invalid(self, name: str, expected: str) -> InvalidArgument:
        return InvalidArgument(
            f"parameter '{name}' of model '{self._model}' is '{self._values[name]}', expected {expected}"
        )


class SharedByDevice(Generic[Loaded]):
    """Loads a model for each instance or, if `shared`, once for all instances on a device. Thread-safe."""

    def __init__(self, *, shared: bool) -> None:
        self._is_shared = shared
        self._loaded: dict[Hashable, Loaded] = {}
        self._lock = threading.Lock()

    def get(self, device: Hashable, load: Callable[[], Loaded]) -> Loaded:
        """Return the model of a device; call `load` if it is not loaded."""
        if not self._is_shared:
            return load()
        with self._lock:
            if device not in self._loaded:
                self._loaded[device] = load()
            return self._loaded[device]

    def clear(self) -> None:
        """Release the shared models."""
        self._loaded.clear()


def server_inputs(config: Any) -> list[str]:
    """Return the names of inputs provided by the server: sequence controls, implicit states and batch inputs."""
    names = [tensor.name for tensor in config.sequence_batching.control_input]
    names += [state.input_name for state in config.sequence_batching.state]
    names += [name for spec in config.batch_input for name in spec.target_name]
    return names


def output_names(config: Any) -> list[str]:
    """Return the names of all outputs of a model: configured outputs and implicit states, without duplicates."""
    names = [tensor.name for tensor in config.output]
    names += [state.output_name for state in config.sequence_batching.state]
    return list(dict.fromkeys(names))
