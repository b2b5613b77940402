"""An adapter as data: low-rank changes of the matrices of a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from neso.engine.lora.errors import AdapterError
from neso.engine.specs.decoder_spec import DecoderSpec, layer_shapes

Target = Literal["query", "key", "value", "output", "gate", "up", "down"]
TARGETS: tuple[Target, ...] = ("query", "key", "value", "output", "gate", "up", "down")
"""The matrices that can be adapted, by their roles in a layer."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The change of one matrix: y += scale * (x A^T) B^T (arXiv 2106.09685).

    a [rank, inputs] and b [outputs, rank] are float32, float16 or bfloat16, and may be unaligned views of a file.
    """

    a: npt.NDArray[Any]
    b: npt.NDArray[Any]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """What an adapter changes in each layer; matrices that are not named stay as they are."""

    layers: tuple[Mapping[Target, LowRank], ...]

    def matrices(self) -> Iterator[tuple[int, Target, LowRank]]:
        """Layer, target and change of everything that is adapted."""
        for index, layer in enumerate(self.layers):
            for target, change in layer.items():
                yield index, target, change

    def check(self, spec: DecoderSpec, max_rank: int) -> None:
        """Raises `AdapterError` if it does not fit the model or has a rank above `max_rank`."""
        if not any(self.layers):
            raise AdapterError("the adapter changes nothing")
        for layer, target, change in self.matrices():
            outputs, inputs = layer_shapes(spec, layer)[target]
            where = f"layer {layer}, {target}"
            if change.a.shape != (change.rank, inputs) or change.b.shape != (outputs, change.rank):
                raise AdapterError(
                    f"{where}: A {list(change.a.shape)} and B {list(change.b.shape)} do not fit a matrix of "
                    f"{outputs} outputs and {inputs} inputs; is the adapter for another model?"
                )
            if not 1 <= change.rank <= max_rank:
                raise AdapterError(
                    f"{where}: the rank is {change.rank}, this engine takes 1 to {max_rank} (max_lora_rank)"
                )
            if not np.isfinite(change.scale):
                raise AdapterError(f"{where}: the scale {change.scale} is no number")


def targets_of(spec: DecoderSpec, layer: int) -> tuple[Target, ...]:
    """The targets that a layer has; experts are none."""
    shapes = layer_shapes(spec, layer)
    return tuple(target for target in TARGETS if target in shapes)


def output_widths(spec: DecoderSpec) -> dict[Target, int]:
    """The outputs of each target's matrix."""
    return {
        target: layer_shapes(spec, layer)[target][0]
        for layer in range(spec.num_layers)
        for target in targets_of(spec, layer)
    }
