"""The operations of a decoder layer as Triton kernels."""

from __future__ import annotations

from torch import Tensor

from neso.engine.runners.torch.kernels.attention import paged_attention
from neso.engine.runners.torch.kernels.cache_write import store
from neso.engine.runners.torch.kernels.gated import gated
from neso.engine.runners.torch.kernels.rms_norm import rms_norm
from neso.engine.runners.torch.kernels.rotary import rotate
from neso.engine.runners.torch.kv_cache import LayerCache
from neso.engine.runners.torch.step_inputs import StepInputs
from neso.engine.specs.decoder_spec import Activation


class TritonOperations:
    """See `Operations`. No kernel needs anything of the host, so that a step can be captured in a CUDA graph."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, residual, weight, eps)

    def rotate(
        self, heads: Tensor, positions: Tensor, cos_sin: Tensor, weight: Tensor | None, eps: float
    ) -> None:
        rotate(heads, positions, cos_sin, weight, eps)

    def store(self, keys: Tensor, values: Tensor, slots: Tensor, cache: LayerCache) -> None:
        store(keys, values, slots, cache)

    def attention(
        self,
        queries: Tensor,
        cache: LayerCache,
        inputs: StepInputs,
        window: int | None,
        scale: float,
        softcap: float,
    ) -> Tensor:
        return paged_attention(queries, cache, inputs, window, scale, softcap)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated(gate_up, activation)
