"""Typed access to the fields of a Hugging Face config.json, with errors that name the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class SpecError(ValueError):
    """config.json does not describe a supported model. The message names the field and is meant for users."""


class InvalidConfig(SpecError):
    """A field is missing, has the wrong type, or contradicts another."""


class UnsupportedModel(SpecError):
    """The config is valid, but the engine does not implement its architecture or one of its features."""


class ConfigReader:
    """Reads the fields of one JSON object.

    An absent or null field returns the default; without a default it is required. Every method raises `InvalidConfig`
    for a value of another type or outside the bounds.
    """

    def __init__(self, values: Mapping[str, Any], within: str = "") -> None:
        """`within` is prepended to field names in messages, e.g. "rope_scaling."."""
        if not isinstance(values, Mapping):
            raise InvalidConfig(f"config field {within.rstrip('.') or 'config.json'!r} must be a JSON object")
        self._values = values
        self._within = within

    @property
    def name(self) -> str:
        """Path of the object, e.g. "rope_scaling"; empty for the config itself."""
        return self._within.rstrip(".")

    def with_default(self, field: str, value: Any) -> ConfigReader:
        """Return a copy with a value for a field that is absent or null."""
        return self if self.has(field) else ConfigReader({**self._values, field: value}, self._within)

    def without(self, *fields: str) -> ConfigReader:
        """Return a copy without these fields."""
        kept = {field: value for field, value in self._values.items() if field not in fields}
        return ConfigReader(kept, self._within)

    def renamed(self, names: Mapping[str, str]) -> ConfigReader:
        """Return a copy with fields renamed by the mapping old name -> new name."""
        values = {names.get(field, field): value for field, value in self._values.items()}
        return ConfigReader(values, self._within)

    def has(self, field: str) -> bool:
        return self._values.get(field) is not None

    def mentions(self, field: str) -> bool:
        """Whether the field is present, possibly null."""
        return field in self._values

    def value(self, field: str) -> Any:
        """Return the raw value; None if absent."""
        return self._values.get(field)

    def nests_objects(self) -> bool:
        """Whether the value of any field is a JSON object."""
        return any(isinstance(value, Mapping) for value in self._values.values())

    def invalid(self, field: str, problem: str) -> InvalidConfig:
        """Return an error about a field, to be raised by the caller."""
        return InvalidConfig(f"config field '{self._within}{field}' {problem}")

    def integer(self, field: str, default: int | None = None, minimum: int = 1) -> int:
        value = self._get(field, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.invalid(field, f"must be an integer, not {value!r}")
        if value < minimum:
            raise self.invalid(field, f"must be at least {minimum}, not {value}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Return a finite positive number."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.invalid(field, f"must be a number, not {value!r}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= 0:
            raise self.invalid(field, f"must be a finite number above zero, not {value!r}")
        return number

    def boolean(self, field: str, default: bool | None = None) -> bool:
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise self.invalid(field, f"must be true or false, not {value!r}")
        return value

    def string(self, field: str, default: str | None = None) -> str:
        value = self._get(field, default)
        if not isinstance(value, str):
            raise self.invalid(field, f"must be a string, not {value!r}")
        return value

    def strings(self, field: str, length: int) -> tuple[str, ...]:
        """Return a list of exactly `length` strings."""
        value = self._get(field, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.invalid(field, f"must be a list of strings, not {value!r}")
        if len(value) != length:
            raise self.invalid(field, f"must have {length} entries, one per layer, but has {len(value)}")
        return tuple(value)

    def integers(self, field: str) -> tuple[int, ...]:
        """Return a list of integers, empty by default."""
        value = self._get(field, [])
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.invalid(field, f"must be a list of integers, not {value!r}")
        return tuple(value)

    def numbers(self, field: str, length: int) -> tuple[float, ...]:
        """Return a list of exactly `length` finite positive numbers."""
        value = self._get(field, None)
        if not isinstance(value, list) or len(value) != length:
            raise self.invalid(field, f"must be a list of {length} numbers")
        return tuple(ConfigReader({field: item}, self._within).number(field) for item in value)

    def section(self, field: str) -> ConfigReader:
        """Return a reader of the JSON object in `field`."""
        return ConfigReader(self._get(field, None), f"{self._within}{field}.")

    def _get(self, field: str, default: Any) -> Any:
        value = self._values.get(field)
        value = default if value is None else value
        if value is None:
            raise self.invalid(field, "is missing")
        return value
