"""One instance of a model that turns arrays into arrays: what the writer of a backend implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy.typing as npt

from neso.server.backend import ModelContext
from neso.server.errors import InvalidArgument

Arrays = dict[str, npt.NDArray[Any]]


class InstanceKind(str, Enum):
    """Where an instance is to run: its group's `kind` in the configuration."""

    CPU = "CPU"
    GPU = "GPU"
    MODEL = "MODEL"
    """Where the model itself says."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Which instance of a model it is. `device` is the number of its GPU, 0 for other kinds."""

    name: str
    kind: InstanceKind
    device: int = 0


class TensorModel(ABC):
    """One instance of a model. Made and used in a thread of its own, which may block.

    `parameters`: those of the configuration, over the settings of the backend (`--backend-config`).
    A `ServerError` that a method raises reaches the client as it is, others as internal errors with their text.
    """

    def __init__(self, context: ModelContext, instance: Instance) -> None:
        self.context = context
        self.instance = instance
        self.parameters = Parameters(context.config, context.backend_config)

    def load(self) -> None:  # noqa: B027  some have nothing to load
        """Get ready to run. Files are in `context.version_directory`. What it raises makes the model UNAVAILABLE."""

    @abstractmethod
    def run(self, inputs: Arrays) -> Arrays:
        """Execute a batch: the outputs, by name.

        Inputs have the datatypes of the configuration (strings: object arrays of `bytes`) and the shapes `dims`, or
        `reshape`; for a model with `max_batch_size` [rows of all requests, *dims]. Optional inputs that the requests
        leave out are not there. Arrays may belong to others: read them only.

        Every output of the configuration must be given in its datatype (strings: `bytes` or `str`), with one row
        for each row of the inputs if the model batches. Further outputs are dropped.
        """

    def unload(self) -> None:  # noqa: B027
        """Give back what `load` took. Also called after a `load` that failed."""


_SWITCHES = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


class Parameters(Mapping[str, str]):
    """By name. `defaults`: the settings of the backend, for names that the model does not set."""

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
        """Raises `InvalidArgument` for what is no integer."""
        text = self._values.get(name)
        try:
            return default if text is None else int(text)
        except ValueError:
            raise self._wrong(name, "an integer") from None

    def boolean(self, name: str, default: bool) -> bool:
        """Raises `InvalidArgument` for what is neither true nor false."""
        text = self._values.get(name)
        if text is None:
            return default
        if text.lower() not in _SWITCHES:
            raise self._wrong(name, "true or false")
        return _SWITCHES[text.lower()]

    def _wrong(self, name: str, expected: str) -> InvalidArgument:
        return InvalidArgument(
            f"parameter '{name}' of model '{self._model}' is '{self._values[name]}', expected {expected}"
        )
