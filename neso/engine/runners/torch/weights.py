"""Weights of a decoder on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from neso.engine.host_resources import available_cores
from neso.engine.parallel.sharding import Shard, open_tensors
from neso.engine.runners.loading_progress import show_progress
from neso.engine.runners.native.packing import SCHEMES, quantize
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
from neso.engine.runners.torch.grouped_weights import GroupedWeights
from neso.engine.runners.torch.linears import (
    DenseLinear,
    ExpertLinears,
    ExpertMatrices,
    Float8Linear,
    JoinedLinear,
    Linear,
    QuantizedExperts,
    QuantizedLinear,
    stack_experts,
)
from neso.engine.specs.decoder_spec import NORM_BIASES, NormRole, Role, model_shapes
from neso.engine.weights.model_tensors import DecoderTensors
from neso.engine.weights.quantized import Float8Matrix, Matrix, can_stack, dense
from neso.engine.weights.source import TensorSource

_DTYPES = {
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float16): torch.float16,
    np.dtype(ml_dtypes.bfloat16): torch.bfloat16,
}
_NAMED = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Norm:
    """Weight and bias [width]; float32 for norms with an offset, which would lose precision by rounding."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MLP:
    """gate_up: product with the stacked matrices of gate and up, or with up alone in a plain MLP."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts.

    - router: one output per expert, then one for the shared expert's gate, if present
    - gate_up, down: products of each expert
    """

    router: Linear
    gate_up: ExpertLinears
    down: ExpertLinears
    shared: MLP | None

    @property
    def count(self) -> int:
        return len(self.down)

    @property
    def stacked(self) -> bool:
        """Whether kernels can multiply the rows of all experts together."""
        kinds = ExpertMatrices | QuantizedExperts
        return isinstance(self.gate_up, kinds) and isinstance(self.down, kinds)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices with the same input are stacked: query, key and value, and gate and up."""

    norms: Mapping[NormRole, Norm]
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp: MLP | Experts


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """`lm_head` multiplies by the embedding if they are tied. None: the spec has no embedding or no head."""

    dtype: torch.dtype
    embedding: Tensor | None
    positions: Tensor | None
    layers: list[LayerWeights]
    final_norm: Norm | None
    lm_head: Linear | None


def _choose_dtype(tensors: DecoderTensors, options: RunnerOptions) -> torch.dtype:
    """Return the dtype of activations and dense weights, the same on all ranks: by default that of the embedding."""
    if options.dtype != "auto":
        return _NAMED[options.dtype]
    found = tensors.stored_dtype("embedding")
    return torch.bfloat16 if found is None else _DTYPES.get(found, torch.float32)


_GATE_UP: tuple[Role, ...] = ("expert_gate", "expert_up")
_DOWN: tuple[Role, ...] = ("expert_down",)


class WeightLoader:
    """Loads the weights of a shard onto a device one matrix, or the experts of one layer, at a time.

    keeps_codes: whether quantized matrices keep their codes, for kernels in Triton; by default on GPUs. Otherwise they
    are dequantized, except float8 with a scale per output or per matrix.
    """

    def __init__(
        self,
        shard: Shard,
        source: TensorSource,
        options: RunnerOptions,
        device: torch.device,
        *,
        keeps_codes: bool | None = None,
    ) -> None:
        self._keeps_codes = device.type == "cuda" if keeps_codes is None else keeps_codes
        supported = ("fp8", "int8", "int4") if self._keeps_codes else ("fp8",)
        if options.quantization not in (None, *supported):
            raise UnsupportedOption(
                f"the torch runner does not quantize to {options.quantization} on {device.type}; it has "
                + ", ".join(supported)
            )
        self._spec, self._tensors, self._device = shard.spec, open_tensors(shard, source), device
        self._to_float8 = options.quantization == "fp8"
        self._scheme = None if self._to_float8 else SCHEMES[options.quantization]
        self._threads = options.num_threads or available_cores()
        self.dtype = _choose_dtype(DecoderTensors(shard.whole, source), options)

    def load(self) -> DecoderWeights:
        """Load all weights. Raises `CheckpointError` if a tensor is missing or has the wrong shape."""
        spec, tensors = self._spec, self._tensors
        stored = model_shapes(spec)
        embedding = self._dense(tensors.matrix("embedding")) if spec.has_embedding else None
        positions = None
        if "position_embedding" in stored:
            positions = self._dense(tensors.table("position_embedding"))
        final_norm, lm_head = None, None
        if spec.has_head:
            if spec.has_final_norm:
                bias = self._vector("final_norm_bias") if spec.norm_bias else None
                final_norm = Norm(self._vector("final_norm"), bias)
            head = embedding if spec.tied_embeddings else self._dense(tensors.matrix("lm_head"))
            assert head is not None
            # Not quantized, because rounding errors directly affect the logits.
            lm_head = DenseLinear(head, self._vector("lm_head_bias") if spec.lm_head_bias else None)
        layers = list(
            show_progress(map(self._layer, range(spec.num_layers)), spec.num_layers, "loading layers")
        )
        return DecoderWeights(self.dtype, embedding, positions, layers, final_norm, lm_head)

    def _layer(self, layer: int) -> LayerWeights:
        spec = self._spec
        qkv_biases: tuple[Role, ...] = ("query_bias", "key_bias", "value_bias") if spec.qkv_bias else ()

        def norm(role: NormRole) -> Norm:
            bias = self._vector(NORM_BIASES[role], layer) if spec.norm_bias else None
            return Norm(self._vector(role, layer), bias)

        return LayerWeights(
            norms={role: norm(role) for role in spec.layer_norms},
            qkv=self._linear(layer, ("query", "key", "value"), qkv_biases),
            query_norm=self._vector("query_norm", layer) if spec.qk_norm else None,
            key_norm=self._vector("key_norm", layer) if spec.qk_norm else None,
            output=self._linear(layer, ("output",), ("output_bias",) if spec.output_bias else ()),
            mlp=self._experts(layer) if spec.is_sparse(layer) else self._mlp(layer),
        )

    def _mlp(self, layer: int) -> MLP:
        spec = self._spec
        inner: tuple[Role, ...] = ("gate", "up") if spec.gated else ("up",)
        biases: tuple[Role, ...] = ("gate_bias", "up_bias") if spec.gated else ("up_bias",)
        return MLP(
            self._linear(layer, inner, biases if spec.mlp_bias else ()),
            self._linear(layer, ("down",), ("down_bias",) if spec.mlp_bias else ()),
        )

    def _experts(self, layer: int) -> Experts:
        experts = self._spec.experts
        assert experts is not None
        roles: tuple[Role, ...] = ("router", "shared_router") if experts.shared_gated else ("router",)
        router = torch.cat([self._dense(self._tensors.matrix(role, layer)) for role in roles])
        shared = None
        if experts.shared_size is not None:
            shared = MLP(
                self._linear(layer, ("shared_gate", "shared_up")), self._linear(layer, ("shared_down",))
            )
        gate_up, down = (self._expert_linears(layer, roles, experts.count) for roles in (_GATE_UP, _DOWN))
        # Not quantized, because rounding errors of the router would send tokens to other experts.
        return Experts(DenseLinear(router), gate_up, down, shared)

    def _expert_linears(self, layer: int, roles: tuple[Role, ...], count: int) -> ExpertLinears:
        experts = [
            [self._quantized(self._tensors.matrix(role, layer, expert)) for role in roles]
            for expert in range(count)
        ]
        parts = [part for expert in experts for part in expert]
        if self._keeps_codes_of(parts):
            return QuantizedExperts(GroupedWeights.load(parts, self.dtype, self._device), count)
        return stack_experts([self._product(expert, None) for expert in experts], self.dtype)

    def _linear(self, layer: int, roles: tuple[Role, ...], biases: tuple[Role, ...] = ()) -> Linear:
        """Return the product with the stacked matrices of these roles."""
        bias = torch.cat([self._vector(role, layer) for role in biases]) if biases else None
        return self._product([self._quantized(self._tensors.matrix(role, layer)) for role in roles], bias)

    def _product(self, parts: Sequence[Matrix], bias: Tensor | None) -> Linear:
        if not self._keeps_codes or all(isinstance(part, np.ndarray) for part in parts) or can_stack(parts):
            return self._stacked(parts, bias)
        part_biases = [None] * len(parts) if bias is None else bias.split([part.shape[0] for part in parts])
        return JoinedLinear(
            [self._stacked([part], own) for part, own in zip(parts, part_biases, strict=True)]
        )

    def _quantized(self, matrix: Matrix) -> Matrix:
        """Quantize a dense matrix to int8 or int4, if the options say so."""
        if self._scheme is None or not isinstance(matrix, np.ndarray):
            return matrix
        return quantize(matrix, self._scheme, self._threads)

    def _stacked(self, parts: Sequence[Matrix], bias: Tensor | None) -> Linear:
        if _have_output_scales(parts):
            return self._stored_float8([part for part in parts if isinstance(part, Float8Matrix)], bias)
        if self._keeps_codes_of(parts):
            return QuantizedLinear(GroupedWeights.load(parts, self.dtype, self._device), bias)
        weight = torch.cat([self._dense(part) for part in parts])
        return Float8Linear.quantized(weight, bias) if self._to_float8 else DenseLinear(weight, bias)

    def _keeps_codes_of(self, parts: Sequence[Matrix]) -> bool:
        return (
            self._keeps_codes
            and not _have_output_scales(parts)
            and can_stack(parts)
            and GroupedWeights.supports(parts[0])
        )

    def _stored_float8(self, parts: list[Float8Matrix], bias: Tensor | None) -> Float8Linear:
        codes = np.concatenate([part.codes.view(np.uint8) for part in parts])
        scales = np.concatenate([part.output_scales() for part in parts])
        return Float8Linear(
            torch.from_numpy(codes).view(torch.float8_e4m3fn).to(self._device),
            torch.from_numpy(scales).to(self._device),
            bias,
        )

    def _vector(self, role: Role, layer: int | None = None) -> Tensor:
        vector = torch.from_numpy(np.ascontiguousarray(self._tensors.vector(role, layer)))
        exact = role.endswith("_norm") and self._spec.norm_offset != 0
        return vector.to(self._device, torch.float32 if exact else self.dtype)

    def _dense(self, matrix: Matrix) -> Tensor:
        weights = dense(matrix)
        if weights.dtype not in _DTYPES:
            weights = weights.astype(np.float32)
        bits = np.require(weights, requirements=["A", "C"]).view(np.dtype(f"i{weights.dtype.itemsize}"))
        # A copy, because the view of the file is read-only.
        return torch.tensor(bits).view(_DTYPES[weights.dtype]).to(self._device, self.dtype)


def _have_output_scales(parts: Sequence[Matrix]) -> bool:
    """Whether the matrices are float8 with a scale per output or per matrix."""
    return all(isinstance(part, Float8Matrix) and part.output_scales() is not None for part in parts)
