"""Sampling parameters of requests that say nothing of them, as a checkpoint's `generation_config.json` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from neso.generation.invalid_parameter import InvalidParameter
from neso.generation.sampling_params import SamplingParams

AUTO, NOWHERE = "auto", "vllm"
"""Of the option `generation_config`: the checkpoint's own file, and none. Anything else is a place."""


def means_a_limit(source: str, override: Mapping[str, Any]) -> bool:
    """Whether `max_new_tokens` is the most for all: of a file asked for by its place, and of the override, as in vLLM.

    By the options `generation_config` and `override_generation_config`.
    """
    return source not in (AUTO, NOWHERE) or "max_new_tokens" in override


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """By the names of that file; None where it has none. `limits_tokens`: nobody gets more than `max_new_tokens`,
    whatever they ask for. Raises `InvalidParameter` with the field's name.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_new_tokens: int | None = None
    limits_tokens: bool = False

    def __post_init__(self) -> None:
        try:
            self.params()
        except InvalidParameter as error:
            raise InvalidParameter(_FILE_NAMES.get(error.field, error.field), error.message) from None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, limits_tokens: bool = False) -> SamplingDefaults:
        """Of all that the file says. What is null is as left out, and other names have nothing to do with it."""
        taken = {name: _typed(name, value) for name in NAMES if (value := values.get(name)) is not None}
        return cls(**taken, limits_tokens=limits_tokens and "max_new_tokens" in taken)

    def given(self) -> dict[str, Any]:
        """Those that there are, without `max_new_tokens`; they are called the same in `SamplingParams`."""
        return {name: value for name in _CHOICES if (value := getattr(self, name)) is not None}

    def max_tokens(self, asked: int | None) -> int | None:
        """Of a request that asks for so many, or does not say; None for no limit."""
        if asked is None:
            return self.max_new_tokens
        most = self.max_new_tokens if self.limits_tokens else None
        return asked if most is None else min(asked, most)

    def params(self) -> SamplingParams:
        """Of a request that says nothing at all."""
        return SamplingParams(**self.given(), max_tokens=self.max_new_tokens)

    def __str__(self) -> str:
        texts = [f"{name} {value}" for name, value in self.given().items()]
        if self.max_new_tokens is not None:
            texts.append(f"max_new_tokens {self.max_new_tokens}{' at most' if self.limits_tokens else ''}")
        return ", ".join(texts)


_KINDS: dict[str, type[int | float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "max_new_tokens": int,
}
NAMES = tuple(_KINDS)
"""What of the file is a default of sampling."""
_CHOICES = tuple(name for name in NAMES if name != "max_new_tokens")
_FILE_NAMES = {"max_tokens": "max_new_tokens"}


def _typed(name: str, value: Any) -> Any:
    try:
        return msgspec.convert(value, _KINDS[name])
    except msgspec.ValidationError as error:
        raise InvalidParameter(name, f"{error}: {value!r}") from None
