"""The `parameters` of a model's configuration, as text, numbers and switches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neso.server.errors import InvalidArgument

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
