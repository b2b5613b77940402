"""The weights of a decoder in float32, packed for few and large matrix products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.tensor_roles import Role, layer_shapes, model_shapes
from neso.engine.weights.source import WeightSource

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [outputs, inputs]; what is packed together is stacked along the outputs."""

    attention_norm: Float32Array
    qkv: Float32Array
    qkv_bias: Float32Array | None
    query_norm: Float32Array | None
    key_norm: Float32Array | None
    output: Float32Array
    output_bias: Float32Array | None
    mlp_norm: Float32Array
    gate_up: Float32Array
    gate_up_bias: Float32Array | None
    down: Float32Array
    down_bias: Float32Array | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """`lm_head` is the embedding itself where they are tied."""

    embedding: Float32Array
    layers: list[LayerWeights]
    final_norm: Float32Array
    lm_head: Float32Array

    @classmethod
    def load(cls, spec: DecoderSpec, source: WeightSource) -> DecoderWeights:
        """Raises `CheckpointError` when a tensor is missing or has the wrong shape."""
        shapes = model_shapes(spec)

        def read(role: Role) -> Float32Array:
            target = np.empty(shapes[role], np.float32)
            source.read_float32(spec.tensor_name(role), target)
            return target

        embedding = read("embedding")
        return cls(
            embedding=embedding,
            layers=[_load_layer(spec, source, layer) for layer in range(spec.num_layers)],
            final_norm=read("final_norm"),
            lm_head=embedding if spec.tied_embeddings else read("lm_head"),
        )


def _load_layer(spec: DecoderSpec, source: WeightSource, layer: int) -> LayerWeights:
    shapes = layer_shapes(spec)

    def stack(*roles: Role) -> Float32Array:
        """The tensors of these roles, one below the other."""
        rows = sum(shapes[role][0] for role in roles)
        packed = np.empty((rows, *shapes[roles[0]][1:]), np.float32)
        start = 0
        for role in roles:
            end = start + shapes[role][0]
            source.read_float32(spec.tensor_name(role, layer), packed[start:end])
            start = end
        return packed

    return LayerWeights(
        attention_norm=stack("attention_norm"),
        qkv=stack("query", "key", "value"),
        qkv_bias=stack("query_bias", "key_bias", "value_bias") if spec.qkv_bias else None,
        query_norm=stack("query_norm") if spec.qk_norm else None,
        key_norm=stack("key_norm") if spec.qk_norm else None,
        output=stack("output"),
        output_bias=stack("output_bias") if spec.output_bias else None,
        mlp_norm=stack("mlp_norm"),
        gate_up=stack("gate", "up"),
        gate_up_bias=stack("gate_bias", "up_bias") if spec.mlp_bias else None,
        down=stack("down"),
        down_bias=stack("down_bias") if spec.mlp_bias else None,
    )
