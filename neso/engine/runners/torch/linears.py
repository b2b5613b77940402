"""Matrix products of a decoder: with dense, float8 and group-quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from neso.engine.runners.torch.grouped_weights import GroupedWeights

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
        if multiplies_float8(x.device) and not (self.codes.shape[0] % 16 or self.codes.shape[1] % 16):
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

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight[outputs, inputs]."""
        return (self.codes.float() * self.scales[:, None]).to(dtype)


def round_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x[rows, columns] to codes e4m3[rows, columns] and scales float32[rows, 1].

    The maximum of a row becomes 448.
    """
    if multiplies_float8(x.device):
        from neso.engine.runners.torch.triton_operations import round_rows

        return round_rows(x)
    scales = (x.abs().amax(dim=1, keepdim=True).float() / FLOAT8_MAX).clamp(min=1e-12)
    return (x.float() / scales).to(FLOAT8), scales


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """x @ weights.T + bias, for weights that keep their codes in memory. Needs Triton: a GPU, or its interpreter.

    On GPUs that multiply e4m3, activations for e4m3 weights are rounded to e4m3, with a scale per token and chunk.
    """

    weights: GroupedWeights
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        from neso.engine.runners.torch.triton_quantized import MAX_PRODUCT_ROWS, dequantize, multiply

        weights = self.weights
        if weights.input_order is not None:
            x = x.index_select(1, weights.input_order)
        rounded = weights.format == "e4m3" and multiplies_float8(x.device)
        if len(x) > MAX_PRODUCT_ROWS and not rounded:
            return functional.linear(x, dequantize(weights, x.dtype), self.bias)
        return multiply(x, weights, self.bias, rounded)


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """Products of the same input with matrices that cannot be stacked; their outputs are adjacent."""

    parts: Sequence[Linear]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """values[experts, outputs, inputs]: dense, or e4m3 with scales float32[experts, outputs]."""

    values: Tensor
    scales: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def outputs(self) -> int:
        return self.values.shape[1]

    def __getitem__(self, expert: int) -> DenseLinear | Float8Linear:
        if self.scales is None:
            return DenseLinear(self.values[expert])
        return Float8Linear(self.values[expert], self.scales[expert])


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """Weights whose outputs are those of `count` experts."""

    weights: GroupedWeights
    count: int

    def __len__(self) -> int:
        return self.count

    @property
    def outputs(self) -> int:
        return self.weights.outputs // self.count

    def __getitem__(self, expert: int) -> QuantizedLinear:
        return QuantizedLinear(self.weights.part(expert * self.outputs, (expert + 1) * self.outputs))


ExpertLinears = ExpertMatrices | QuantizedExperts | Sequence[Linear]
"""The product of each expert."""


def stack_experts(linears: Sequence[Linear], dtype: torch.dtype) -> ExpertLinears:
    """Stack the matrices of experts, which have no bias.

    If some are dense, those in float8 become dense with this dtype. Quantized matrices are not stacked.
    """
    plain = [linear for linear in linears if isinstance(linear, DenseLinear | Float8Linear)]
    float8 = [linear for linear in plain if isinstance(linear, Float8Linear)]
    if len(plain) < len(linears):
        return linears
    if len(float8) == len(linears):
        codes = torch.stack([linear.codes.view(torch.uint8) for linear in float8])
        return ExpertMatrices(codes.view(FLOAT8), torch.stack([linear.scales for linear in float8]))
    return ExpertMatrices(
        torch.stack(
            [
                linear.weight if isinstance(linear, DenseLinear) else linear.dequantized(dtype)
                for linear in plain
            ]
        )
    )


def multiplies_float8(device: torch.device) -> bool:
    """Whether the device has products of e4m3 (compute capability 8.9 and up)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
