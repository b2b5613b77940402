"""Vision towers for square images (CLIP, SigLIP), and projectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.runners.base import LayerStack
from neso.engine.runners.numpy_layers import ACTIVATIONS, layer_norm, linear
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.specs.vision_spec import ProjectorSpec, TowerSpec, VisionSpec
from neso.engine.vision.image_processor import Normalization
from neso.engine.weights.model_tensors import EncoderTensors
from neso.engine.weights.source import TensorSource

Float32Array = npt.NDArray[np.float32]


class SquareTower:
    """The tower and the projector of a `VisionSpec`. Runs one tile of an image at a time, to limit the memory."""

    def __init__(
        self, weights: _Weights, layers: LayerStack, projector: Projector, normalization: Normalization
    ) -> None:
        self._weights, self._layers = weights, layers
        self._projector, self._normalization = projector, normalization

    @classmethod
    def load(
        cls,
        spec: VisionSpec,
        source: TensorSource,
        stack: type[LayerStack],
        options: RunnerOptions,
        normalization: Normalization,
    ) -> SquareTower:
        """Load the tensors. Raises `CheckpointError` if a tensor is missing or does not fit, `UnsupportedOption`."""
        tensors = EncoderTensors(source, spec.tower.prefixes)
        layers = stack.load(spec.tower.layers, tensors, options)
        weights = _Weights.load(spec.tower, tensors)
        return cls(weights, layers, Projector.load(spec.projector, source), normalization)

    def encode(self, pixels: npt.NDArray[np.uint8]) -> Float32Array:
        """Compute embeddings float32[tiles * tokens_per_tile, output_size] of uint8[tiles, edge, edge, 3]."""
        return np.concatenate([self._projector.project(self._tile(tile)) for tile in pixels])

    def _tile(self, pixels: npt.NDArray[np.uint8]) -> Float32Array:
        """Return the rows of the tower float32[num_rows, hidden] for uint8[edge, edge, 3]."""
        weights, spec = self._weights, self._weights.spec
        x = linear(
            _patches(self._normalization.apply(pixels), spec.patch_size), weights.patches, weights.patch_bias
        )
        if weights.class_token is not None:
            x = np.concatenate([weights.class_token[None], x])
        x = x + weights.positions
        if weights.first_norm is not None:
            x = layer_norm(x, *weights.first_norm, spec.layers.norm_eps)
        x = self._layers.run(x, np.array([0, len(x)], np.int32))
        if weights.last_norm is not None:
            x = layer_norm(x, *weights.last_norm, spec.layers.norm_eps)
        return x


class Projector:
    """The matrices of a `ProjectorSpec`, [outputs, inputs]."""

    def __init__(self, spec: ProjectorSpec, matrices: list[tuple[Float32Array, Float32Array | None]]) -> None:
        self._spec, self._matrices = spec, matrices

    @classmethod
    def load(cls, spec: ProjectorSpec, source: TensorSource) -> Projector:
        """Load the tensors. Raises `CheckpointError`."""
        tensors = EncoderTensors(source, spec.prefixes)
        matrices = [
            (tensors.weight(name, (outputs, inputs)), tensors.bias(name, outputs) if spec.bias else None)
            for name, inputs, outputs in zip(spec.names, spec.widths[:-1], spec.widths[1:], strict=True)
        ]
        return cls(spec, matrices)

    def project(self, x: Float32Array) -> Float32Array:
        """Return the embeddings of the rows of one tile."""
        spec = self._spec
        x = _merge_squares(x[spec.drops_first_row :], spec.merge)
        for number, (weight, bias) in enumerate(self._matrices):
            x = linear(ACTIVATIONS[spec.activation](x) if number else x, weight, bias)
        return x


@dataclass(frozen=True, slots=True)
class _Weights:
    """Tensors outside the layers. `patches`: [hidden, 3 * patch_size ** 2], channels first; norms: weight and bias."""

    spec: TowerSpec
    class_token: Float32Array | None
    patches: Float32Array
    patch_bias: Float32Array | None
    positions: Float32Array
    first_norm: tuple[Float32Array, Float32Array] | None
    last_norm: tuple[Float32Array, Float32Array] | None

    @classmethod
    def load(cls, spec: TowerSpec, tensors: EncoderTensors) -> _Weights:
        hidden, names = spec.layers.hidden_size, spec.tensor_names
        patch = spec.patch_size

        def norm(name: str) -> tuple[Float32Array, Float32Array]:
            return tensors.weight(name, (hidden,)), tensors.bias(name, hidden)

        return cls(
            spec=spec,
            class_token=tensors.tensor(names["class_token"], (hidden,)) if spec.has_class_token else None,
            patches=tensors.weight(names["patches"], (hidden, 3, patch, patch)).reshape(hidden, -1),
            patch_bias=tensors.bias(names["patches"], hidden) if spec.patch_bias else None,
            positions=tensors.weight(names["positions"], (spec.num_rows, hidden)),
            first_norm=norm(names["first_norm"]) if spec.has_first_norm else None,
            last_norm=norm(names["last_norm"]) if spec.has_last_norm else None,
        )


def _patches(image: Float32Array, size: int) -> Float32Array:
    """Cut float32[height, width, 3] into squares, row by row: [patches, 3 * size * size], channels first."""
    rows, columns = image.shape[0] // size, image.shape[1] // size
    cut = image[: rows * size, : columns * size].reshape(rows, size, columns, size, 3)
    return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3)).reshape(rows * columns, -1)


def _merge_squares(x: Float32Array, merge: int) -> Float32Array:
    """Concatenate the rows of each square of `merge` x `merge` patches, row by row (pixel shuffle)."""
    if merge == 1:
        return x
    side = round(len(x) ** 0.5) // merge
    squares = x.reshape(side, merge, side, merge, -1).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(squares).reshape(side * side, -1)
