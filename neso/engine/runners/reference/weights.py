"""The weights of a decoder in float32, stacked for few large matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.specs.decoder_spec import NORM_BIASES, NormRole, Role, model_shapes
from neso.engine.weights.model_tensors import DecoderTensors

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NormWeights:
    """Weight and bias of a norm, float32[width]."""

    weight: Float32Array
    bias: Float32Array | None = None


@dataclass(frozen=True, slots=True)
class MLPWeights:
    """gate_up: rows of the gate, then those of up; up alone in an MLP without gate."""

    gate_up: Float32Array
    gate_up_bias: Float32Array | None
    down: Float32Array
    down_bias: Float32Array | None


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """router: one row per expert, then the row of the shared expert's gate, if present."""

    router: Float32Array
    experts: list[MLPWeights]
    shared: MLPWeights | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [outputs, inputs]; `qkv` is stacked along the outputs."""

    norms: Mapping[NormRole, NormWeights]
    qkv: Float32Array
    qkv_bias: Float32Array | None
    query_norm: Float32Array | None
    key_norm: Float32Array | None
    output: Float32Array
    output_bias: Float32Array | None
    mlp: MLPWeights | ExpertsWeights


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """`lm_head` is the embedding array if they are tied. None: the spec has no embedding or no head."""

    embedding: Float32Array | None
    position_embedding: Float32Array | None
    layers: list[LayerWeights]
    final_norm: NormWeights | None
    lm_head: Float32Array | None
    lm_head_bias: Float32Array | None

    @classmethod
    def load(cls, tensors: DecoderTensors) -> DecoderWeights:
        """Read the weights. Raises `CheckpointError` if a tensor is missing or has the wrong shape."""
        spec, model = tensors.spec, _Reader(tensors, None)
        stored = model_shapes(spec)

        def optional(role: Role) -> Float32Array | None:
            return model.stack(role) if role in stored else None

        embedding, final_norm = optional("embedding"), optional("final_norm")
        return cls(
            embedding=embedding,
            position_embedding=optional("position_embedding"),
            layers=[_load_layer(_Reader(tensors, layer), layer) for layer in range(spec.num_layers)],
            final_norm=None if final_norm is None else NormWeights(final_norm, optional("final_norm_bias")),
            lm_head=embedding if spec.tied_embeddings else optional("lm_head"),
            lm_head_bias=optional("lm_head_bias"),
        )


class _Reader:
    """Reads the tensors of one layer, or of the model outside the layers."""

    def __init__(self, tensors: DecoderTensors, layer: int | None) -> None:
        self.spec = tensors.spec
        self._tensors = tensors
        self._layer = layer

    def stack(self, *roles: Role, expert: int | None = None) -> Float32Array:
        """Return the tensors of these roles, stacked along the outputs."""
        shapes = [self._tensors.shape(role, self._layer) for role in roles]
        packed = np.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), np.float32)
        start = 0
        for role, shape in zip(roles, shapes, strict=True):
            end = start + shape[0]
            self._tensors.read_float32(role, packed[start:end], self._layer, expert)
            start = end
        return packed


def _load_layer(reader: _Reader, layer: int) -> LayerWeights:
    spec, stack = reader.spec, reader.stack

    def norm(role: NormRole) -> NormWeights:
        return NormWeights(stack(role), stack(NORM_BIASES[role]) if spec.norm_bias else None)

    return LayerWeights(
        norms={role: norm(role) for role in spec.layer_norms},
        qkv=stack("query", "key", "value"),
        qkv_bias=stack("query_bias", "key_bias", "value_bias") if spec.qkv_bias else None,
        query_norm=stack("query_norm") if spec.qk_norm else None,
        key_norm=stack("key_norm") if spec.qk_norm else None,
        output=stack("output"),
        output_bias=stack("output_bias") if spec.output_bias else None,
        mlp=_load_experts(reader) if spec.is_sparse(layer) else _load_mlp(reader),
    )


def _load_mlp(reader: _Reader) -> MLPWeights:
    spec, stack = reader.spec, reader.stack
    inner: tuple[Role, ...] = ("gate", "up") if spec.gated else ("up",)
    biases: tuple[Role, ...] = ("gate_bias", "up_bias") if spec.gated else ("up_bias",)
    return MLPWeights(
        gate_up=stack(*inner),
        gate_up_bias=stack(*biases) if spec.mlp_bias else None,
        down=stack("down"),
        down_bias=stack("down_bias") if spec.mlp_bias else None,
    )


def _load_experts(reader: _Reader) -> ExpertsWeights:
    experts, stack = reader.spec.experts, reader.stack
    assert experts is not None
    shared = None
    if experts.shared_size is not None:
        shared = MLPWeights(stack("shared_gate", "shared_up"), None, stack("shared_down"), None)
    return ExpertsWeights(
        router=stack("router", "shared_router") if experts.shared_gated else stack("router"),
        experts=[
            MLPWeights(
                stack("expert_gate", "expert_up", expert=index),
                None,
                stack("expert_down", expert=index),
                None,
            )
            for index in range(experts.count)
        ],
        shared=shared,
    )
