"""Encoder layers of the reference runner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neso.engine.runners.base import Float32Array, Int32Array, LayerStack
from neso.engine.runners.reference.attention import softmax_weighted
from neso.engine.runners.reference.layers import ACTIVATIONS, layer_norm, linear
from neso.engine.runners.runner_options import DEFAULT_OPTIONS, RunnerOptions, UnsupportedOption
from neso.engine.specs.encoder_spec import LayerRole, LayerStackSpec
from neso.engine.weights.model_tensors import EncoderTensors


@dataclass(frozen=True, slots=True)
class Affine:
    """A matrix [outputs, inputs] with its bias, or weight and bias of a norm."""

    weight: Float32Array
    bias: Float32Array


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [outputs, inputs]; `qkv` stacks queries, keys and values."""

    attention_norm: Affine
    qkv: Affine
    output: Affine
    mlp_norm: Affine
    up: Affine
    down: Affine


class ReferenceLayerStack(LayerStack):
    """Encoder layers in NumPy. Attention runs per sequence, everything else on all tokens at once."""

    def __init__(self, spec: LayerStackSpec, layers: list[LayerWeights]) -> None:
        self.spec = spec
        self._layers = layers

    @classmethod
    def load(
        cls, spec: LayerStackSpec, tensors: EncoderTensors, options: RunnerOptions = DEFAULT_OPTIONS
    ) -> ReferenceLayerStack:
        if options.quantization is not None or options.dtype not in ("auto", "float32"):
            raise UnsupportedOption("the reference runner computes in float32 and does not quantize")
        return cls(spec, [_read_layer(spec, tensors, layer) for layer in range(spec.num_layers)])

    def run(self, x: Float32Array, starts: Int32Array) -> Float32Array:
        spec = self.spec
        for layer in self._layers:
            if spec.norm_first:
                x = x + self._attention(layer, self._norm(x, layer.attention_norm), starts)
                x = x + self._mlp(layer, self._norm(x, layer.mlp_norm))
            else:
                x = self._norm(x + self._attention(layer, x, starts), layer.attention_norm)
                x = self._norm(x + self._mlp(layer, x), layer.mlp_norm)
        return x

    def _norm(self, x: Float32Array, norm: Affine) -> Float32Array:
        return layer_norm(x, norm.weight, norm.bias, self.spec.norm_eps)

    def _mlp(self, layer: LayerWeights, x: Float32Array) -> Float32Array:
        activated = ACTIVATIONS[self.spec.activation](linear(x, layer.up.weight, layer.up.bias))
        return linear(activated, layer.down.weight, layer.down.bias)

    def _attention(self, layer: LayerWeights, x: Float32Array, starts: Int32Array) -> Float32Array:
        spec = self.spec
        qkv = linear(x, layer.qkv.weight, layer.qkv.bias).reshape(len(x), 3, spec.num_heads, spec.head_dim)
        attended = np.empty((len(x), spec.num_heads, spec.head_dim), np.float32)
        for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            queries, keys, values = qkv[start:end].transpose(1, 2, 0, 3)  # [heads, tokens, head_dim]
            scores = (queries * np.float32(spec.attention_scale)) @ keys.swapaxes(-1, -2)
            attended[start:end] = softmax_weighted(scores, values).swapaxes(0, 1)
        return linear(attended.reshape(len(x), -1), layer.output.weight, layer.output.bias)


def _read_layer(spec: LayerStackSpec, tensors: EncoderTensors, layer: int) -> LayerWeights:
    """Read the weights of one layer in float32. Raises `CheckpointError`."""
    hidden, width = spec.hidden_size, spec.num_heads * spec.head_dim

    def affine(role: LayerRole, *shape: int) -> Affine:
        name = spec.tensor_names[role].format(layer=layer)
        return Affine(tensors.weight(name, shape), tensors.bias(name, shape[0]))

    qkv = [affine(role, width, hidden) for role in ("query", "key", "value")]
    return LayerWeights(
        attention_norm=affine("attention_norm", hidden),
        qkv=Affine(np.concatenate([a.weight for a in qkv]), np.concatenate([a.bias for a in qkv])),
        output=affine("output", hidden, width),
        mlp_norm=affine("mlp_norm", hidden),
        up=affine("up", spec.intermediate_size, hidden),
        down=affine("down", hidden, spec.intermediate_size),
    )
