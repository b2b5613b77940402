"""Rotary position embedding as data: base, width and scaling of frequencies for long contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from neso.engine.specs.config_reader import ConfigReader, UnsupportedModel

MAX_LENGTH = 2**31 - 1
"""Positions have 32 bits."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Dynamic NTK: the base grows with the sequence beyond `original_max_position` tokens."""

    factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between them."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): interpolation by rotations per context.

    Cosines and sines are multiplied by `attention_factor`. `truncate` rounds the ramp's ends to whole dimensions,
    as the paper's code does.
    """

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE (arXiv 2402.13753): the frequency of each pair of dimensions is divided by its own factor.

    Short factors are for sequences of at most `original_max_position` tokens, long factors for longer ones. Keys
    computed with one set do not match queries computed with the other, so all sequences use the same set: the long one
    if `extended`. Cosines and sines are multiplied by `attention_factor`.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float
    extended: bool

    @property
    def factors(self) -> tuple[float, ...]:
        return self.long_factors if self.extended else self.short_factors


RotaryScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling


def scaled_length(scaling: RotaryScaling | None, max_position: int) -> int:
    """Return the maximum sequence length in tokens of a model with `max_position_embeddings` `max_position`."""
    if isinstance(scaling, (LinearScaling, DynamicScaling)):
        return _length(max_position, scaling.factor)
    if isinstance(scaling, YarnScaling):
        return max(max_position, _length(scaling.original_max_position, scaling.factor))
    return max_position


def _length(original: int, factor: float) -> int:
    return int(min(original * factor, MAX_LENGTH))


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotation of the first `rotary_dim` dimensions of each head in pairs (i, i + rotary_dim / 2).

    `sections`: number of pairs that rotate by the position on the axis time, height and width (M-RoPE, arXiv
    2409.12191); empty if all rotate by the position in the sequence.
    """

    theta: float
    rotary_dim: int
    scaling: RotaryScaling | None
    sections: tuple[int, ...] = ()

    def axes(self) -> npt.NDArray[np.intp]:
        """Return the axis of each pair, intp[rotary_dim / 2], for a rotation with sections."""
        return np.repeat(np.arange(len(self.sections)), self.sections)

    def for_length(self, length: int) -> RotarySpec:
        """Return the rotation for sequences of at most `length` tokens: LongRoPE's short factors if they suffice."""
        scaling = self.scaling
        if isinstance(scaling, LongScaling) and length <= scaling.original_max_position:
            return replace(self, scaling=replace(scaling, extended=False))
        return self

    @classmethod
    def from_config(cls, config: ConfigReader, head_dim: int, max_position: int) -> RotarySpec:
        """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4).

        `rope_scaling` takes precedence, as in transformers.
        """
        field = "rope_scaling" if config.value("rope_scaling") else "rope_parameters"
        rope = config.section(field) if config.has(field) else ConfigReader({}, f"{field}.")
        return cls.from_section(config, rope, head_dim, max_position)

    @classmethod
    def from_section(
        cls, config: ConfigReader, rope: ConfigReader, head_dim: int, max_position: int
    ) -> RotarySpec:
        """Read the object `rope`; fields missing in it are taken from `config`."""
        if rope.nests_objects():
            raise UnsupportedModel(
                f"config field {rope.name!r} asks for several rotary embeddings, which is not supported"
            )
        theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
        fraction = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
        rotary_dim = int(head_dim * fraction)
        if fraction > 1.0 or rotary_dim < 2 or rotary_dim % 2:
            raise config.invalid(
                "partial_rotary_factor" if fraction != 1.0 else "head_dim",
                f"gives {rotary_dim} rotary dimensions in heads of {head_dim}; they must be even and fit",
            )
        scaling = _read_scaling(rope, config, theta, rotary_dim, max_position)
        return cls(theta, rotary_dim, scaling, _read_sections(rope, rotary_dim))


def _read_sections(rope: ConfigReader, rotary_dim: int) -> tuple[int, ...]:
    if not rope.has("mrope_section"):
        return ()
    if rope.boolean("mrope_interleaved", False):
        raise UnsupportedModel(f"config field '{rope.name}.mrope_interleaved': true is not supported")
    sections = rope.integers("mrope_section")
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != rotary_dim // 2:
        raise rope.invalid(
            "mrope_section", f"must be three numbers whose sum is {rotary_dim // 2}, not {list(sections)}"
        )
    return sections


def _read_scaling(
    rope: ConfigReader, config: ConfigReader, theta: float, rotary_dim: int, max_position: int
) -> RotaryScaling | None:
    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind in ("default", "mrope"):
        return None
    if kind == "linear":
        return LinearScaling(rope.number("factor"))
    if kind == "dynamic":
        if rotary_dim <= 2:
            raise rope.invalid("rope_type", "'dynamic' needs more than two rotary dimensions")
        return DynamicScaling(_read_growth_factor(rope), max_position)
    original = config.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", max_position),
    )
    # Early Phi 3 configs name LongRoPE "su" or "yarn".
    if kind in ("longrope", "su") or (kind == "yarn" and rope.has("short_factor")):
        return _read_long(rope, original, rotary_dim, max_position)
    if kind == "llama3":
        return _read_llama3(rope, original)
    if kind == "yarn":
        if theta <= 1.0:
            raise rope.invalid("rope_theta", f"must be above 1 for 'yarn', not {theta}")
        return _read_yarn(rope, original, max_position)
    raise UnsupportedModel(
        f"rotary scaling {kind!r} (config field 'rope_scaling' or 'rope_parameters') is not supported; "
        "supported are default, linear, dynamic, llama3, yarn, longrope"
    )


def _read_growth_factor(rope: ConfigReader) -> float:
    factor = rope.number("factor")
    if factor < 1.0:
        raise rope.invalid("factor", f"must be at least 1, not {factor}")
    return factor


def _read_long(rope: ConfigReader, original: int, rotary_dim: int, max_position: int) -> LongScaling:
    factor = rope.number("factor", max_position / original)
    growth = 1 + math.log(factor) / math.log(original) if factor > 1.0 and original > 1 else 1.0
    return LongScaling(
        short_factors=rope.numbers("short_factor", rotary_dim // 2),
        long_factors=rope.numbers("long_factor", rotary_dim // 2),
        original_max_position=original,
        attention_factor=rope.number("attention_factor", math.sqrt(growth)),
        extended=max_position > original,
    )


def _read_llama3(rope: ConfigReader, original: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor"), original
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.invalid("high_freq_factor", "must be above low_freq_factor")
    return scaling


def _read_yarn(rope: ConfigReader, original: int, max_position: int) -> YarnScaling:
    factor = rope.number("factor", max_position / original)
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
    )


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    """Return the square root of 1/t in equation 22 of YaRN; DeepSeek's `mscale` pair changes its slope."""

    def slope(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    # Zero means absent, as in transformers.
    if rope.value("mscale") and rope.value("mscale_all_dim"):
        return slope(rope.number("mscale")) / slope(rope.number("mscale_all_dim"))
    return slope(1.0)
