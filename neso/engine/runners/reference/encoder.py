"""Encoder layers of the reference runner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neso.engine.runners.base import Float32Array, Int32Array, LayerStack, positions_in_sequences
from neso.engine.runners.reference.attention import softmax_weighted
from neso.engine.runners.reference.layers import ACTIVATIONS, layer_norm, linear
from neso.engine.runners.reference.rotary import cos_sin, rotate
from neso.engine.runners.runner_options import DEFAULT_OPTIONS, RunnerOptions, UnsupportedOption
from neso.engine.specs.encoder_spec import LayerRole, LayerStackSpec
from neso.engine.weights.model_tensors import EncoderTensors, LayerTensors


@dataclass(frozen=True, slots=True)
class Affine:
    """A matrix [outputs, inputs] with its bias if it has one, or weight and bias of a norm."""

    weight: Float32Array
    bias: Float32Array | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [outputs, inputs]; `qkv` stacks queries, keys and values."""

    attention_norm: Affine | None
    qkv: Affine
    output: Affine
    mlp_norm: Affine
    gate: Affine | None
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
        for index, layer in enumerate(self._layers):
            if spec.norm_first:
                x = x + self._attention(index, layer, self._norm(x, layer.attention_norm), starts)
                x = x + self._mlp(layer, self._norm(x, layer.mlp_norm))
            else:
                x = self._norm(x + self._attention(index, layer, x, starts), layer.attention_norm)
                x = self._norm(x + self._mlp(layer, x), layer.mlp_norm)
        return x

    def _norm(self, x: Float32Array, norm: Affine | None) -> Float32Array:
        return x if norm is None else layer_norm(x, norm.weight, norm.bias, self.spec.norm_eps)

    def _mlp(self, layer: LayerWeights, x: Float32Array) -> Float32Array:
        activation, up = ACTIVATIONS[self.spec.activation], linear(x, layer.up.weight, layer.up.bias)
        if layer.gate is None:
            activated = activation(up)
        else:
            activated = activation(linear(x, layer.gate.weight, layer.gate.bias)) * up
        return linear(activated, layer.down.weight, layer.down.bias)

    def _attention(
        self, index: int, layer: LayerWeights, x: Float32Array, starts: Int32Array
    ) -> Float32Array:
        spec, rotary, reach = self.spec, self.spec.rotary(index), self.spec.reach(index)
        qkv = linear(x, layer.qkv.weight, layer.qkv.bias).reshape(len(x), 3, spec.num_heads, spec.head_dim)
        if rotary is not None:
            cos, sin = cos_sin(rotary, positions_in_sequences(starts))
            for heads in (qkv[:, 0], qkv[:, 1]):
                rotate(heads, cos, sin)
        attended = np.empty((len(x), spec.num_heads, spec.head_dim), np.float32)
        for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            queries, keys, values = qkv[start:end].transpose(1, 2, 0, 3)  # [heads, tokens, head_dim]
            scores = (queries * np.float32(spec.attention_scale)) @ keys.swapaxes(-1, -2)
            if reach is not None:
                places = np.arange(end - start)
                scores[:, np.abs(places[:, None] - places) > reach] = -np.inf
            attended[start:end] = softmax_weighted(scores, values).swapaxes(0, 1)
        return linear(attended.reshape(len(x), -1), layer.output.weight, layer.output.bias)


def _read_layer(spec: LayerStackSpec, tensors: EncoderTensors, layer: int) -> LayerWeights:
    """Read the weights of one layer in float32. Raises `CheckpointError`."""
    read = LayerTensors(spec, tensors, layer)

    def affine(*roles: LayerRole) -> Affine:
        return Affine(np.concatenate([read.weight(role) for role in roles]), read.biases(*roles))

    return LayerWeights(
        attention_norm=affine("attention_norm") if spec.has_attention_norm(layer) else None,
        qkv=affine("query", "key", "value"),
        output=affine("output"),
        mlp_norm=affine("mlp_norm"),
        gate=affine("gate") if spec.gated else None,
        up=affine("up"),
        down=affine("down"),
    )
