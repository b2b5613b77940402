"""Data of LoRA adapters: low-rank updates of the matrices of a decoder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neso.engine.core.step_plan import Int32Array, PlanPart
from neso.engine.lora.config import AdapterError
from neso.engine.specs.decoder_spec import DecoderSpec, layer_shapes
from neso.generation.request import LoraTensors

Target = Literal["query", "key", "value", "output", "gate", "up", "down"]
TARGETS: tuple[Target, ...] = ("query", "key", "value", "output", "gate", "up", "down")
"""Matrices that can be adapted."""

PRODUCTS: tuple[tuple[Target, ...], ...] = (
    ("query", "key", "value"),
    ("output",),
    ("gate", "up"),
    ("down",),
)
"""The targets of each product of a layer, which have the same input, in the order of its outputs. The indices are those
of csrc/model/adapter.h."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The update of one matrix: y += scale * (x A^T) B^T (arXiv 2106.09685).

    a [rank, inputs] and b [outputs, rank] are float32, float16 or bfloat16, and may be unaligned views of a file.
    """

    a: npt.NDArray[Any]
    b: npt.NDArray[Any]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True, eq=False)
class LoraPlan(PlanPart):
    """Adapters of a step, for runners with "lora". slots int32[S]: the runner's slot of each sequence, -1 for none."""

    slots: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """Updates of each layer, by target matrix."""

    layers: tuple[Mapping[Target, LowRank], ...]

    def matrices(self) -> Iterator[tuple[int, Target, LowRank]]:
        """Yield the layer, target and update of every adapted matrix."""
        for index, layer in enumerate(self.layers):
            for target, change in layer.items():
                yield index, target, change

    def digest(self) -> str:
        """Return a digest of the updates, to compare adapters of two engines."""
        total = hashlib.sha256()
        for layer, target, change in self.matrices():
            total.update(f"{layer} {target} {change.scale!r} {change.a.dtype} {change.a.shape}".encode())
            total.update(change.a.tobytes())
            total.update(change.b.tobytes())
        return total.hexdigest()

    def check(self, spec: DecoderSpec, max_rank: int) -> None:
        """Check that the adapter fits the model and that no rank exceeds `max_rank`. Raises `AdapterError`."""
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
    """Return the adaptable matrices of a layer. Experts cannot be adapted."""
    shapes = layer_shapes(spec, layer)
    return tuple(target for target in TARGETS if target in shapes)


def output_widths(spec: DecoderSpec) -> dict[Target, int]:
    """Return the number of outputs of each target's matrix."""
    return {
        target: layer_shapes(spec, layer)[target][0]
        for layer in range(spec.num_layers)
        for target in targets_of(spec, layer)
    }


# TensorRT-LLM's module ids and the matrices that they adapt. As in its converter of PEFT checkpoints, mlp_h_to_4h is
# the matrix before the activation (Llama's gate_proj), and mlp_gate is the other factor (Llama's up_proj).
_MODULES: dict[int, tuple[Target, ...]] = {
    0: ("query", "key", "value"),
    1: ("query",),
    2: ("key",),
    3: ("value",),
    4: ("output",),
    5: ("gate",),
    6: ("down",),
    7: ("up",),
}
_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def read_tensors(tensors: LoraTensors, spec: DecoderSpec, max_rank: int) -> LoraAdapter:
    """Return the adapter for the model of `spec`. Raises `AdapterError` with the name of the invalid tensor."""
    values = np.frombuffer(tensors.weights, _DTYPES[tensors.dtype])
    if not tensors.config or values.size != len(tensors.config) * tensors.width:
        raise AdapterError(
            f"has {values.size} values, lora_config says {len(tensors.config)} rows of {tensors.width}",
            "lora_weights",
        )
    rows = values.reshape(len(tensors.config), tensors.width)
    layers: list[dict[Target, LowRank]] = [{} for _ in range(spec.num_layers)]
    for row, (module, layer, rank) in zip(rows, tensors.config, strict=True):
        if not 0 <= layer < spec.num_layers:
            raise AdapterError(f"layer {layer} is not in this model of {spec.num_layers}", "lora_config")
        shapes, known = layer_shapes(spec, layer), targets_of(spec, layer)
        targets = tuple(_target(target, known) for target in _MODULES.get(module, ()))
        if not targets or not all(target in known for target in targets):
            raise AdapterError(
                f"module id {module} stands for nothing that can be adapted here", "lora_config"
            )
        if not 1 <= rank <= max_rank:
            raise AdapterError(
                f"adapter size {rank} is not in 1 to {max_rank} (max_lora_rank)", "lora_config"
            )
        inputs = shapes[targets[0]][1]
        outputs = [shapes[target][0] for target in targets]
        if rank * (inputs + sum(outputs)) > tensors.width:
            raise AdapterError(
                f"a row of {tensors.width} values is too short for rank {rank} of module {module}",
                "lora_weights",
            )
        a = row[: rank * inputs].reshape(rank, inputs)
        b = row[rank * inputs : rank * (inputs + sum(outputs))].reshape(-1, rank)
        for target, part in zip(targets, np.split(b, np.cumsum(outputs)[:-1]), strict=True):
            if target in layers[layer]:
                raise AdapterError(f"adapts {target} of layer {layer} twice", "lora_config")
            layers[layer][target] = LowRank(a, part, 1.0)
    adapter = LoraAdapter(tuple(layers))
    adapter.check(spec, max_rank)
    return adapter


def _target(target: Target, known: tuple[Target, ...]) -> Target:
    """Map a target to the model's matrix: in an MLP without a gate, mlp_h_to_4h is the up projection."""
    return "up" if target == "gate" and "gate" not in known else target
