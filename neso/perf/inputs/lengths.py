"""Distributions of prompt and output lengths, in tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from neso.perf.errors import PerfError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths around a mean, at least `minimum`.

    They have a normal distribution with `stddev`, or a uniform one in mean ± mean · `range_ratio`.
    """

    mean: float
    stddev: float = 0.0
    range_ratio: float = 0.0
    minimum: int = 1

    def __post_init__(self) -> None:
        if self.mean < 0 or self.stddev < 0:
            raise PerfError(f"lengths need a mean and a standard deviation of at least 0, got {self}")
        if not 0 <= self.range_ratio <= 1:
            raise PerfError(f"the range ratio of lengths must be from 0 to 1, got {self.range_ratio}")
        if self.stddev and self.range_ratio:
            raise PerfError("give either a standard deviation or a range ratio of lengths, not both")

    def sample(self, rng: np.random.Generator) -> int:
        """Return one length."""
        value = self.mean
        if self.stddev:
            value = rng.normal(self.mean, self.stddev)
        elif self.range_ratio:
            value = rng.uniform(self.mean * (1 - self.range_ratio), self.mean * (1 + self.range_ratio))
        return max(self.minimum, round(value))


@dataclass(frozen=True, slots=True)
class LengthMix:
    """A mix of pairs of prompt and output lengths, each with a probability."""

    pairs: tuple[tuple[Lengths, Lengths | None], ...]
    weights: tuple[float, ...]

    def sample(self, rng: np.random.Generator) -> tuple[int, int | None]:
        """Return a prompt length and an output length; None leaves the output length to the server."""
        chosen = 0 if len(self.pairs) == 1 else int(rng.choice(len(self.pairs), p=self.weights))
        prompt, output = self.pairs[chosen]
        return prompt.sample(rng), None if output is None else output.sample(rng)


def single_mix(prompt: Lengths, output: Lengths | None) -> LengthMix:
    """Return the mix that has only one pair."""
    return LengthMix(((prompt, output),), (1.0,))


_PAIR = re.compile(r"\(?\s*([\d.]+)(?:\|([\d.]+))?\s*,\s*([\d.]+)(?:\|([\d.]+))?\s*\)?\s*:\s*([\d.]+)")
_FORMS = (
    "expected 'ISL,OSL:PERCENT;…', for example '256,128:40;512|20,256|10:60', "
    "'[(256,128):40,(512,256):60]', or a JSON object with \"pairs\""
)


def parse_length_mix(text: str) -> LengthMix:
    """Parse the value of `--seq-dist`.

    Pairs are ISL,OSL:PERCENT, where a length may be MEAN|STDDEV. Percentages sum to 100. Raises `PerfError`.
    """
    entries = _json_entries(text) if text.lstrip().startswith("{") else _text_entries(text)
    if not entries:
        raise PerfError(f"--seq-dist '{text}': {_FORMS}")
    total = sum(entry[4] for entry in entries)
    if abs(total - 100) > 0.1:
        raise PerfError(f"--seq-dist '{text}': the percentages sum to {total:g}, expected 100")
    pairs = tuple((Lengths(isl, isl_std), Lengths(osl, osl_std)) for isl, isl_std, osl, osl_std, _ in entries)
    return LengthMix(pairs, tuple(entry[4] / total for entry in entries))


def _text_entries(text: str) -> list[tuple[float, ...]]:
    bare = text.strip()
    if bare.startswith("[") and bare.endswith("]"):
        parts: Sequence[str] = re.split(r",(?=\s*\()", bare[1:-1])
    else:
        parts = bare.split(";")
    entries = []
    for part in parts:
        if not part.strip():
            continue
        found = _PAIR.fullmatch(part.strip())
        if found is None:
            raise PerfError(f"--seq-dist: cannot read '{part.strip()}': {_FORMS}")
        try:
            entries.append(tuple(float(value or 0) for value in found.groups()))
        except ValueError:
            raise PerfError(f"--seq-dist: cannot read '{part.strip()}': {_FORMS}") from None
    return entries


def _json_entries(text: str) -> list[tuple[float, ...]]:
    try:
        pairs: list[dict[str, Any]] = json.loads(text)["pairs"]
        return [
            (
                float(pair["isl"]),
                float(pair.get("isl_stddev", 0)),
                float(pair["osl"]),
                float(pair.get("osl_stddev", 0)),
                float(pair["prob"]),
            )
            for pair in pairs
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PerfError(
            f"--seq-dist: cannot read the JSON ({type(error).__name__}: {error}): {_FORMS}"
        ) from None
