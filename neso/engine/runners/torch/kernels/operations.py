"""The operations of a decoder layer as Triton kernels."""

from __future__ import annotations

from torch import Tensor

from neso.engine.runners.torch.kernels.attention import paged_attention
from neso.engine.runners.torch.kernels.cache_write import store
from neso.engine.runners.torch.kernels.gated import gated
from neso.engine.runners.torch.kernels.rms_norm import rms_norm
from neso.engine.runners.torch.kernels.rotary import rotate


class TritonOperations:
    """See `Operations`. No kernel needs anything of the host, so that a step can be captured in a CUDA graph."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, residual, weight, eps)

    rotate = staticmethod(rotate)
    store = staticmethod(store)
    attention = staticmethod(paged_attention)
    gated = staticmethod(gated)
