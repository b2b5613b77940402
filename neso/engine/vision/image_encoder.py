"""Vision tower: computes the embeddings of images in prompts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from neso.engine.addons.input_embeddings import EmbeddingRows
from neso.engine.core.request import PromptImage
from neso.engine.runners.base import LayerStack, RunnerOptions
from neso.engine.runners.numpy_layers import ACTIVATIONS, layer_norm, linear
from neso.engine.specs.encoder_spec import VisionSpec
from neso.engine.weights.model_tensors import EncoderTensors
from neso.engine.weights.source import TensorSource

Float32Array = npt.NDArray[np.float32]

CACHE_BYTES = 256 << 20
"""Size of the embedding cache in bytes. In a chat, the same image is sent with every message."""


class ImageEncoder:
    """Runs the model of a `VisionSpec`, one image at a time."""

    def __init__(
        self, spec: VisionSpec, tower: _Tower, layers: LayerStack, normalization: Normalization
    ) -> None:
        self.spec = spec
        self._tower, self._layers, self._normalization = tower, layers, normalization
        self._seen: OrderedDict[bytes, Float32Array] = OrderedDict()
        self.num_encoded = 0

    @classmethod
    def load(
        cls,
        spec: VisionSpec,
        source: TensorSource,
        stack: type[LayerStack],
        options: RunnerOptions,
        normalization: Normalization,
    ) -> ImageEncoder:
        """Load the tensors. Raises `CheckpointError` if a tensor is missing or does not fit, `UnsupportedOption`."""
        tensors = EncoderTensors(source, spec.prefixes)
        layers = stack.load(spec.layers, tensors, options)
        return cls(spec, _Tower.load(spec, tensors), layers, normalization)

    def embedding_rows(self, images: list[PromptImage]) -> EmbeddingRows:
        """Return the embeddings of a prompt's images, computed when a step first needs one.

        Their digests are those of the pixels, so cached prefixes do not need the tower.
        """
        digests = [blake2b(image.pixels, digest_size=16).digest() for image in images]
        positions = np.concatenate([np.frombuffer(image.positions, np.int32) for image in images])
        count = self.spec.tokens_per_image
        keys = [
            blake2b(digest + index.to_bytes(4, "little"), digest_size=16).digest()
            for digest in digests
            for index in range(count)
        ]

        def compute() -> Float32Array:
            return np.concatenate(
                [self._rows(image.pixels, digest) for image, digest in zip(images, digests, strict=True)]
            )

        return EmbeddingRows(positions, compute, keys)

    def encode(self, pixels: npt.NDArray[np.uint8]) -> Float32Array:
        """Compute embeddings float32[tokens_per_image, output_size] of an image uint8[image_size, image_size, 3]."""
        self.num_encoded += 1
        spec, tower = self.spec, self._tower
        patches = _patches(self._normalization.apply(pixels), spec.patch_size)
        x = np.concatenate([tower.class_token[None], linear(patches, tower.patches)]) + tower.positions
        x = layer_norm(x, tower.norm_weight, tower.norm_bias, spec.layers.norm_eps)
        x = self._layers.run(x, np.array([0, len(x)], np.int32))
        if not spec.keeps_class_token:
            x = x[1:]
        hidden = ACTIVATIONS[spec.projector_activation](linear(x, tower.first, tower.first_bias))
        return linear(hidden, tower.second, tower.second_bias)

    def _rows(self, pixels: bytes, digest: bytes) -> Float32Array:
        rows = self._seen.get(digest)
        if rows is None:
            size = self.spec.image_size
            rows = self.encode(np.frombuffer(pixels, np.uint8).reshape(size, size, 3))
            self._seen[digest] = rows
            while len(self._seen) * rows.nbytes > CACHE_BYTES and len(self._seen) > 1:
                self._seen.popitem(last=False)
        self._seen.move_to_end(digest)
        return rows


@dataclass(frozen=True, slots=True)
class Normalization:
    """(pixel * scale - mean) / deviation, per channel."""

    scale: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def apply(self, pixels: npt.NDArray[np.uint8]) -> Float32Array:
        """Convert uint8[height, width, 3] to float32[height, width, 3]."""
        mean, deviation = (np.array(values, np.float32) for values in (self.mean, self.deviation))
        scaled = (pixels.astype(np.float64) * self.scale).astype(np.float32)
        normalized: Float32Array = np.divide(scaled - mean, deviation, dtype=np.float32)
        return normalized


@dataclass(frozen=True, slots=True)
class _Tower:
    """Tensors outside the layers. `patches`: [hidden, 3 * patch_size ** 2], channels first."""

    class_token: Float32Array
    patches: Float32Array
    positions: Float32Array
    norm_weight: Float32Array
    norm_bias: Float32Array
    first: Float32Array
    first_bias: Float32Array | None
    second: Float32Array
    second_bias: Float32Array | None

    @classmethod
    def load(cls, spec: VisionSpec, tensors: EncoderTensors) -> _Tower:
        hidden, out, names = spec.layers.hidden_size, spec.output_size, spec.tensor_names
        patch = spec.patch_size
        projector = EncoderTensors(tensors.source, ("multi_modal_projector.", "model.multi_modal_projector."))

        def bias(name: str) -> Float32Array | None:
            return projector.bias(name, out) if spec.projector_bias else None

        return cls(
            class_token=tensors.tensor(names["class_token"], (hidden,)),
            patches=tensors.tensor(names["patches"], (hidden, 3, patch, patch)).reshape(hidden, -1),
            positions=tensors.weight(names["positions"], (spec.num_patches + 1, hidden)),
            norm_weight=tensors.weight(names["first_norm"], (hidden,)),
            norm_bias=tensors.bias(names["first_norm"], hidden),
            first=projector.weight("linear_1", (out, hidden)),
            first_bias=bias("linear_1"),
            second=projector.weight("linear_2", (out, out)),
            second_bias=bias("linear_2"),
        )


def _patches(image: Float32Array, size: int) -> Float32Array:
    """Cut float32[height, width, 3] into squares, row by row: [patches, 3 * size * size], channels first."""
    rows, columns = image.shape[0] // size, image.shape[1] // size
    cut = image[: rows * size, : columns * size].reshape(rows, size, columns, size, 3)
    return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3)).reshape(rows * columns, -1)
