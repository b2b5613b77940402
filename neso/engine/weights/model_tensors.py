"""Access to tensors of a model by their role in a spec, independent of naming variants between checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.specs.decoder_spec import (
    DecoderSpec,
    Role,
    Shape,
    TensorPart,
    TensorProduct,
    layer_shapes,
    model_shapes,
)
from neso.engine.specs.encoder_spec import LayerRole, LayerStackSpec
from neso.engine.weights.quantized import Matrix, dense, take_rows
from neso.engine.weights.source import TensorSource

Float32Array = npt.NDArray[np.float32]

# Names of norm parameters in old BERT checkpoints.
_OLD_NAMES = {"weight": "gamma", "bias": "beta"}


class DecoderTensors:
    """Reads the tensors of a `DecoderSpec`; matrices are [outputs, inputs].

    `layer` is given for roles of a layer, `expert` for roles of an expert. All methods raise `CheckpointError` if a
    tensor is missing or does not have the spec's shape.
    """

    def __init__(self, spec: DecoderSpec, source: TensorSource) -> None:
        self.spec = spec
        self._source = source
        # The fused tensor read last, so that it is not unpacked for each of its parts.
        self._last: tuple[str, Matrix] | None = None

    def shape(self, role: Role, layer: int | None = None) -> Shape:
        shapes = model_shapes(self.spec) if layer is None else layer_shapes(self.spec, layer)
        return shapes[role]

    def matrix(self, role: Role, layer: int | None = None, expert: int | None = None) -> Matrix:
        """Return the matrix as stored: dense (possibly unaligned or strided) or quantized."""
        outputs, inputs = self.shape(role, layer)
        name, location = self._find(role, layer, expert), self.spec.tensor_names[role]
        if isinstance(location, str):
            return self._source.matrix(name, (outputs, inputs))
        if isinstance(location, TensorProduct):
            return self._product(location, outputs, inputs)
        if self._last is None or self._last[0] != name:
            stored = (inputs, location.outputs) if location.transposed else (location.outputs, inputs)
            whole = self._source.matrix(name, stored)
            self._last = name, dense(whole).T if location.transposed else whole
        return take_rows(self._last[1], location.rows())

    def vector(self, role: Role, layer: int | None = None) -> Float32Array:
        """Return a bias, or the weights of a norm including the spec's `norm_offset`."""
        shape = self.shape(role, layer)
        name, location = self._find(role, layer), self.spec.tensor_names[role]
        if isinstance(location, TensorPart):
            whole = np.empty(location.outputs, np.float32)
            self._source.read_float32(name, whole)
            values: Float32Array = whole[location.rows()]
        else:
            values = np.empty(shape, np.float32)
            self._source.read_float32(name, values)
        if role.endswith("_norm") and self.spec.norm_offset:
            values += np.float32(self.spec.norm_offset)
        return values

    def read_float32(
        self, role: Role, target: Float32Array, layer: int | None = None, expert: int | None = None
    ) -> None:
        """Copy a matrix or a vector into `target`, converted and dequantized."""
        if target.ndim == 1:
            target[...] = self.vector(role, layer)
        elif isinstance(self.spec.tensor_names[role], str):
            self._source.read_float32(self._find(role, layer, expert), target)
        else:
            target[...] = dense(self.matrix(role, layer, expert))

    def table(self, role: Role) -> npt.NDArray[Any]:
        """Return an embedding table, in the dtype of the file; float32 if it is a product."""
        location = self.spec.tensor_names[role]
        if isinstance(location, TensorProduct):
            outputs, inputs = self.shape(role)
            return self._product(location, outputs, inputs)
        return self._source.tensor(self._find(role), self.shape(role))

    def stored_dtype(self, role: Role) -> np.dtype[Any] | None:
        """Return the dtype in which the file stores a matrix outside the layers; None if it is quantized."""
        location = self.spec.tensor_names[role]
        outputs, inputs = self.shape(role)
        if isinstance(location, TensorProduct):
            inputs = location.inner
        found = self._source.matrix(self._find(role), (outputs, inputs))
        return found.dtype if isinstance(found, np.ndarray) else None

    def _product(self, location: TensorProduct, outputs: int, inputs: int) -> Float32Array:
        inner = location.inner
        rows = np.empty((outputs, inner), np.float32)
        self._source.read_float32(self._stored(location.name), rows)
        factor = np.empty((inputs, inner) if location.transposed else (inner, inputs), np.float32)
        self._source.read_float32(self._stored(location.factor), factor)
        product: Float32Array = rows @ (factor.T if location.transposed else factor)
        return product

    def _find(self, role: Role, layer: int | None = None, expert: int | None = None) -> str:
        return self._stored(self.spec.tensor_name(role, layer, expert))

    def _stored(self, name: str) -> str:
        """Return a tensor's name in the source; the spec's name if the tensor is missing.

        Checkpoints without LM head omit the first component of names ("model."). Checkpoints with a vision tower
        prepend "language_model." (transformers 4), or insert it or "text_model." after the first component.
        """
        bare = name.partition(".")[2]
        candidates = (
            name,
            bare,
            f"language_model.{name}",
            f"model.language_model.{bare}",
            f"model.text_model.{bare}",
        )
        return next((candidate for candidate in candidates if candidate in self._source), name)


@dataclass(frozen=True, slots=True)
class EncoderTensors:
    """Reads tensors of an encoder by the names in its spec, optionally prefixed by one of `prefixes`.

    All methods raise `CheckpointError` if a tensor is missing or has another shape.
    """

    source: TensorSource
    prefixes: tuple[str, ...] = ()

    def weight(self, name: str, shape: tuple[int, ...]) -> Float32Array:
        """Return the tensor `name`.weight in float32."""
        return self._read(self._find(name, "weight"), shape)

    def bias(self, name: str, size: int) -> Float32Array:
        """Return the tensor `name`.bias in float32."""
        return self._read(self._find(name, "bias"), (size,))

    def tensor(self, name: str, shape: tuple[int, ...]) -> Float32Array:
        """Return the tensor `name` in float32."""
        candidates = [name, *(prefix + name for prefix in self.prefixes)]
        return self._read(next((found for found in candidates if found in self.source), name), shape)

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """Return the tensor `name`.weight as stored, [outputs, inputs]."""
        return self.source.matrix(self._find(name, "weight"), shape)

    def _find(self, name: str, part: str) -> str:
        for suffix in (part, _OLD_NAMES[part]):
            for prefix in ("", *self.prefixes):
                if (found := f"{prefix}{name}.{suffix}") in self.source:
                    return found
        return f"{name}.{part}"

    def _read(self, name: str, shape: tuple[int, ...]) -> Float32Array:
        target = np.empty(shape, np.float32)
        self.source.read_float32(name, target)
        return target


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """Reads tensors of one layer of a `LayerStackSpec` by role. Raises `CheckpointError` like `EncoderTensors`."""

    spec: LayerStackSpec
    tensors: EncoderTensors
    layer: int

    def matrix(self, role: LayerRole) -> Matrix:
        """Return a matrix as stored, [outputs, inputs]."""
        outputs, inputs = self.spec.shape(role)
        place = self.spec.tensor_names[role]
        if isinstance(place, TensorPart):
            return take_rows(self.tensors.matrix(self._name(role), (place.outputs, inputs)), place.rows())
        return self.tensors.matrix(self._name(role), (outputs, inputs))

    def weight(self, role: LayerRole) -> Float32Array:
        """Return a matrix or the weight of a norm in float32."""
        shape, place = self.spec.shape(role), self.spec.tensor_names[role]
        if isinstance(place, TensorPart):
            return self.tensors.weight(self._name(role), (place.outputs, *shape[1:]))[place.rows()]
        return self.tensors.weight(self._name(role), shape)

    def bias(self, role: LayerRole) -> Float32Array | None:
        """Return the bias in float32; None if there is none."""
        if role not in self.spec.biased:
            return None
        place = self.spec.tensor_names[role]
        if isinstance(place, TensorPart):
            return self.tensors.bias(self._name(role), place.outputs)[place.rows()]
        return self.tensors.bias(self._name(role), self.spec.shape(role)[0])

    def biases(self, *roles: LayerRole) -> Float32Array | None:
        """Return the biases of matrices that are stacked; all of them have one, or none."""
        found = [bias for role in roles if (bias := self.bias(role)) is not None]
        return np.concatenate(found) if found else None

    def _name(self, role: LayerRole) -> str:
        place = self.spec.tensor_names[role]
        return (place if isinstance(place, str) else place.name).format(layer=self.layer)
