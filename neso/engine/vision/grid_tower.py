"""Vision tower of Qwen2-VL and Qwen2.5-VL in NumPy: images of any size, with rotary positions of rows and columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.runners.numpy_layers import ACTIVATIONS, layer_norm, linear, rms_norm
from neso.engine.specs.vision_spec import GridVisionSpec
from neso.engine.vision.image_processor import Normalization
from neso.engine.weights.model_tensors import EncoderTensors
from neso.engine.weights.source import TensorSource

Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.intp]

_EPS = 1e-6
_MAX_QUERIES = 512
"""Queries of a head whose scores are in memory at once: 32 MiB for 16384 patches."""

Linear = Callable[[Float32Array], Float32Array]
Norm = Callable[[Float32Array], Float32Array]


class GridTower:
    """The tower and the projector of a `GridVisionSpec`, on the CPU in float32."""

    def __init__(self, spec: GridVisionSpec, weights: _Weights, normalization: Normalization) -> None:
        self._spec, self._weights, self._normalization = spec, weights, normalization

    @classmethod
    def load(cls, spec: GridVisionSpec, source: TensorSource, normalization: Normalization) -> GridTower:
        """Load the tensors. Raises `CheckpointError` if a tensor is missing or does not fit."""
        return cls(spec, _Weights.load(spec, EncoderTensors(source, spec.prefixes)), normalization)

    def encode(self, pixels: npt.NDArray[np.uint8]) -> Float32Array:
        """Compute embeddings float32[rows * columns, num_outputs] of uint8[1, height, width, 3].

        Height and width are rows and columns times `tile_edge`.
        """
        spec, weights = self._spec, self._weights
        unit = spec.merge**2
        grid = pixels.shape[1] // spec.tile_edge, pixels.shape[2] // spec.tile_edge
        # Patches of an embedding are adjacent, and embeddings of a window.
        order, windows = window_order(*grid, spec.window)
        patches = (order[:, None] * unit + np.arange(unit)).reshape(-1)
        whole = np.array([0, len(patches)], np.intp)
        x = linear(self._patches(self._normalization.apply(pixels[0]), *grid)[patches], weights.patches)
        rotation = self._rotation(*grid, patches)
        for number, layer in enumerate(weights.layers):
            starts = windows * unit if spec.attends_within_windows(number) else whole
            x += layer.output(self._attention(layer.qkv(layer.attention_norm(x)), rotation, starts))
            x += layer.mlp(layer.mlp_norm(x))
        merged = weights.merger(weights.merger_norm(x).reshape(len(order), -1))
        embeddings = np.empty_like(merged)
        embeddings[order] = merged
        return embeddings

    def _patches(self, image: Float32Array, rows: int, columns: int) -> Float32Array:
        """Cut float32[height, width, 3] into patches [P, 3 * patch_size ** 2], channels first."""
        size, merge = self._spec.patch_size, self._spec.merge
        cut = image.reshape(rows, merge, size, columns, merge, size, 3)
        return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, 3 * size * size)

    def _rotation(self, rows: int, columns: int, patches: IntArray) -> tuple[Float32Array, Float32Array]:
        """Return cosines and sines float32[P, 1, head_dim / 2] of patches, given in the order of `_patches`."""
        merge, quarter = self._spec.merge, self._spec.head_dim // 4
        row, column = np.indices((rows * merge, columns * merge), np.float32)
        positions = np.stack(
            [
                axis.reshape(rows, merge, columns, merge).swapaxes(1, 2).reshape(-1)[patches]
                for axis in (row, column)
            ],
            axis=1,
        )
        exponents = np.arange(quarter, dtype=np.float32) / np.float32(quarter)
        frequencies = (1 / np.float32(self._spec.rotary_theta) ** exponents).astype(np.float32)
        angles = (positions[:, :, None] * frequencies).reshape(len(patches), 1, 2 * quarter)
        return np.cos(angles), np.sin(angles)

    def _attention(
        self, qkv: Float32Array, rotation: tuple[Float32Array, Float32Array], starts: IntArray
    ) -> Float32Array:
        """Return the attention float32[P, hidden] of float32[P, 3 * hidden], within each starts[i]:starts[i + 1]."""
        spec = self._spec
        heads = qkv.reshape(len(qkv), 3, spec.num_heads, spec.head_dim)
        queries, keys = (_rotate(heads[:, part], *rotation).transpose(1, 0, 2) for part in (0, 1))
        queries *= np.float32(spec.head_dim**-0.5)
        values = heads[:, 2].transpose(1, 0, 2)
        out = np.empty((len(qkv), spec.num_heads, spec.head_dim), np.float32)
        for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            if end - start <= _MAX_QUERIES:
                near = slice(start, end)
                out[near] = _attend(queries[:, near], keys[:, near], values[:, near]).transpose(1, 0, 2)
                continue
            for head in range(spec.num_heads):
                for first in range(start, end, _MAX_QUERIES):
                    chosen = slice(first, min(first + _MAX_QUERIES, end))
                    out[chosen, head] = _attend(
                        queries[head, chosen], keys[head, start:end], values[head, start:end]
                    )
        return out.reshape(len(qkv), -1)


def window_order(rows: int, columns: int, window: int | None) -> tuple[IntArray, IntArray]:
    """Return the cells of a grid, numbered row by row, window by window: order[rows * columns], starts[windows + 1].

    Windows are squares of `window` x `window` cells, smaller at the right and lower border; None: one window.
    """
    if window is None:
        return np.arange(rows * columns), np.array([0, rows * columns], np.intp)
    row, column = np.indices((rows, columns)).reshape(2, -1) // window
    numbers = row * -(-columns // window) + column
    return np.argsort(numbers, kind="stable"), np.concatenate([[0], np.cumsum(np.bincount(numbers))])


def _rotate(heads: Float32Array, cos: Float32Array, sin: Float32Array) -> Float32Array:
    """Return float32[P, heads, head_dim] with dimension i rotated with i + head_dim / 2."""
    first, second = np.split(heads, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attend(queries: Float32Array, keys: Float32Array, values: Float32Array) -> Float32Array:
    """Return softmax(queries @ keys.T) @ values for float32[..., rows, head_dim]."""
    scores = queries @ keys.swapaxes(-1, -2)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    attended: Float32Array = scores @ values / scores.sum(axis=-1, keepdims=True)
    return attended


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Norm
    qkv: Linear
    output: Linear
    mlp_norm: Norm
    mlp: Linear


@dataclass(frozen=True, slots=True)
class _Weights:
    """`patches`: [hidden, 3 * patch_size ** 2], channels first."""

    patches: Float32Array
    layers: list[_Layer]
    merger_norm: Norm
    merger: Linear

    @classmethod
    def load(cls, spec: GridVisionSpec, tensors: EncoderTensors) -> _Weights:
        hidden, size, copies = spec.hidden_size, spec.patch_size, spec.patch_copies
        wide = hidden * spec.merge**2
        patches = tensors.weight("patch_embed.proj", (hidden, 3, copies, size, size))
        first = _linear(tensors, "merger.mlp.0", wide, wide)
        second = _linear(tensors, "merger.mlp.2", wide, spec.num_outputs)
        return cls(
            # An image is shown `patch_copies` times.
            patches=patches.sum(axis=2).reshape(hidden, -1),
            layers=[_layer(spec, tensors, f"blocks.{number}.") for number in range(spec.num_layers)],
            merger_norm=_norm(spec, tensors, "merger.ln_q"),
            merger=lambda x: second(ACTIVATIONS["gelu"](first(x))),
        )


def _layer(spec: GridVisionSpec, tensors: EncoderTensors, prefix: str) -> _Layer:
    hidden = spec.hidden_size
    return _Layer(
        attention_norm=_norm(spec, tensors, prefix + "norm1"),
        qkv=_linear(tensors, prefix + "attn.qkv", hidden, 3 * hidden),
        output=_linear(tensors, prefix + "attn.proj", hidden, hidden),
        mlp_norm=_norm(spec, tensors, prefix + "norm2"),
        mlp=_mlp(spec, tensors, prefix + "mlp."),
    )


def _mlp(spec: GridVisionSpec, tensors: EncoderTensors, prefix: str) -> Linear:
    hidden, wide, activation = spec.hidden_size, spec.intermediate_size, ACTIVATIONS[spec.activation]
    if not spec.gated:
        up, down = (
            _linear(tensors, prefix + "fc1", hidden, wide),
            _linear(tensors, prefix + "fc2", wide, hidden),
        )
        return lambda x: down(activation(up(x)))
    gate, up = (_linear(tensors, prefix + name, hidden, wide) for name in ("gate_proj", "up_proj"))
    down = _linear(tensors, prefix + "down_proj", wide, hidden)
    return lambda x: down(activation(gate(x)) * up(x))


def _linear(tensors: EncoderTensors, name: str, inputs: int, outputs: int) -> Linear:
    weight, bias = tensors.weight(name, (outputs, inputs)), tensors.bias(name, outputs)
    return lambda x: linear(x, weight, bias)


def _norm(spec: GridVisionSpec, tensors: EncoderTensors, name: str) -> Norm:
    weight = tensors.weight(name, (spec.hidden_size,))
    if spec.norm == "rms":
        return lambda x: rms_norm(x, weight, _EPS)
    bias = tensors.bias(name, spec.hidden_size)
    return lambda x: layer_norm(x, weight, bias, _EPS)
