"""Matrix products with the weights of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

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
    """x @ (codes * scales).T + bias for codes e4m3[outputs, inputs] and a scale float32[outputs] for each output.

    Where the GPU multiplies e4m3 (compute capability 8.9 on), the activations are rounded to it too, with a scale
    for each token; elsewhere the codes are converted for each product, which saves memory and not time.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if _multiplies_float8(x.device) and not (self.codes.shape[0] % 16 or self.codes.shape[1] % 16):
            rounded, x_scales = round_to_float8(x)
            # bfloat16, with a bias in it, is what every such GPU gives; the inputs have fewer bits than that.
            bias = None if self.bias is None else self.bias.bfloat16()
            return torch._scaled_mm(
                rounded, self.codes.t(), x_scales, self.scales[None], bias=bias, out_dtype=torch.bfloat16
            ).to(x.dtype)
        # Sums of codes may be too large for float16, and scales too small.
        wide = torch.float32 if x.dtype == torch.float16 else x.dtype
        product = functional.linear(x.to(wide), self.codes.to(wide)) * self.scales.to(wide)
        return (product if self.bias is None else product + self.bias).to(x.dtype)

    @classmethod
    def quantized(cls, weight: Tensor, bias: Tensor | None = None) -> Float8Linear:
        """Round a dense weight[outputs, inputs]."""
        codes, scales = round_to_float8(weight)
        return cls(codes, scales[:, 0], bias)


def round_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes e4m3[rows, columns] and scales float32[rows, 1] of x[rows, columns]: the largest becomes 448."""
    if _multiplies_float8(x.device):
        from neso.engine.runners.torch.kernels.float8 import round_rows

        return round_rows(x)
    scales = (x.abs().amax(dim=1, keepdim=True).float() / FLOAT8_MAX).clamp(min=1e-12)
    return (x.float() / scales).to(FLOAT8), scales


def _multiplies_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
