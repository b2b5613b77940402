"""Weights of a decoder on the device, and matrix products with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from neso.engine.parallel.sharding import Shard, open_tensors
from neso.engine.runners.loading_progress import show_progress
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
from neso.engine.specs.decoder_spec import NORM_BIASES, NormRole, Role, model_shapes
from neso.engine.weights.model_tensors import DecoderTensors
from neso.engine.weights.quantized import Float8Matrix, Matrix, dense
from neso.engine.weights.source import TensorSource

Linear = Callable[[Tensor], Tensor]
"""[tokens, inputs] -> [tokens, outputs], in the dtype of the activations."""

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """x @ weight.T + bias for weight[outputs, inputs]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Float8Linear:
    """x @ (codes * scales).T + bias for codes e4m3[outputs, inputs] and scales float32[outputs].

    On GPUs that multiply e4m3 (compute capability 8.9 and up), activations are rounded to e4m3 too, with a scale per
    token. On other GPUs the codes are converted for each product, which saves memory but not time.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if _multiplies_float8(x.device) and not (self.codes.shape[0] % 16 or self.codes.shape[1] % 16):
            rounded, x_scales = round_to_float8(x)
            # All such GPUs support bfloat16 output and bias; the inputs have fewer bits.
            bias = None if self.bias is None else self.bias.bfloat16()
            return torch._scaled_mm(
                rounded, self.codes.t(), x_scales, self.scales[None], bias=bias, out_dtype=torch.bfloat16
            ).to(x.dtype)
        # Sums of codes may overflow float16, and scales underflow.
        wide = torch.float32 if x.dtype == torch.float16 else x.dtype
        product = functional.linear(x.to(wide), self.codes.to(wide)) * self.scales.to(wide)
        return (product if self.bias is None else product + self.bias).to(x.dtype)

    @classmethod
    def quantized(cls, weight: Tensor, bias: Tensor | None = None) -> Float8Linear:
        """Quantize a dense weight[outputs, inputs]."""
        codes, scales = round_to_float8(weight)
        return cls(codes, scales[:, 0], bias)


def round_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x[rows, columns] to codes e4m3[rows, columns] and scales float32[rows, 1].

    The maximum of a row becomes 448.
    """
    if _multiplies_float8(x.device):
        from neso.engine.runners.torch.triton_operations import round_rows

        return round_rows(x)
    scales = (x.abs().amax(dim=1, keepdim=True).float() / FLOAT8_MAX).clamp(min=1e-12)
    return (x.float() / scales).to(FLOAT8), scales


def _multiplies_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


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
    """router: one output per expert, then one for the shared expert's gate, if present."""

    router: Linear
    experts: list[MLP]
    shared: MLP | None


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


class WeightLoader:
    """Loads the weights of a shard onto a device one matrix at a time.

    Quantized matrices are dequantized, except float8 with a scale per output or per matrix.
    """

    def __init__(
        self, shard: Shard, source: TensorSource, options: RunnerOptions, device: torch.device
    ) -> None:
        if options.quantization not in (None, "fp8"):
            raise UnsupportedOption(
                f"the torch runner does not quantize to {options.quantization}; it has fp8"
            )
        self._spec, self._tensors, self._device = shard.spec, open_tensors(shard, source), device
        self._to_float8 = options.quantization == "fp8"
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
        made = [
            MLP(
                self._linear(layer, ("expert_gate", "expert_up"), expert=expert),
                self._linear(layer, ("expert_down",), expert=expert),
            )
            for expert in range(experts.count)
        ]
        # Not quantized, because rounding errors of the router would send tokens to other experts.
        return Experts(DenseLinear(router), made, shared)

    def _linear(
        self, layer: int, roles: tuple[Role, ...], biases: tuple[Role, ...] = (), expert: int | None = None
    ) -> Linear:
        """Return the product with the stacked matrices of these roles."""
        bias = torch.cat([self._vector(role, layer) for role in biases]) if biases else None
        parts = [self._tensors.matrix(role, layer, expert) for role in roles]
        if all(isinstance(part, Float8Matrix) and part.output_scales() is not None for part in parts):
            return self._stored_float8([part for part in parts if isinstance(part, Float8Matrix)], bias)
        weight = torch.cat([self._dense(part) for part in parts])
        return Float8Linear.quantized(weight, bias) if self._to_float8 else DenseLinear(weight, bias)

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
