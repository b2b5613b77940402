"""Attention over the paged KV cache: the interface, and the choice of a backend (`attention_backend`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
from neso.engine.runners.torch.kv_cache import HeadShape, LayerCache
from neso.engine.runners.torch.step_inputs import StepInputs


class Attention(Protocol):
    """See `Operations.attention`."""

    def __call__(
        self,
        queries: Tensor,
        cache: LayerCache,
        inputs: StepInputs,
        window: int | None,
        scale: float,
        softcap: float,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model needs from a backend: the heads of each layer, the dtype, tokens per block, sink tokens."""

    heads: Sequence[HeadShape]
    dtype: torch.dtype
    block_size: int
    sinks: int = 0


class AttentionBackend(ABC):
    """Attention of a library. `fallback` computes the steps that libraries cannot: trees of draft tokens.

    - name: value of `attention_backend`
    - block_multiple: the number of tokens of a block must be a multiple of it
    """

    name: str
    block_multiple = 1

    def __init__(self, fallback: Attention) -> None:
        self._fallback = fallback

    def __call__(
        self,
        queries: Tensor,
        cache: LayerCache,
        inputs: StepInputs,
        window: int | None,
        scale: float,
        softcap: float,
    ) -> Tensor:
        attend = self.attend if inputs.tree_masks is None else self._fallback
        return attend(queries, cache, inputs, window, scale, softcap)

    @abstractmethod
    def attend(
        self,
        queries: Tensor,
        cache: LayerCache,
        inputs: StepInputs,
        window: int | None,
        scale: float,
        softcap: float,
    ) -> Tensor:
        """Compute `Operations.attention` for a step without trees of draft tokens and without sinks."""

    @abstractmethod
    def supports_head_dim(self, head_dim: int) -> bool: ...

    def check(self, needs: AttentionNeeds) -> None:
        """Raise `UnsupportedOption` if the model needs more than the library has."""
        if problem := self._problem(needs):
            raise UnsupportedOption(f"attention_backend: {self.name} {problem}; use auto or triton")

    def _problem(self, needs: AttentionNeeds) -> str | None:
        if needs.dtype not in (torch.float16, torch.bfloat16):
            return f"computes in float16 and bfloat16, not in {needs.dtype}".replace("torch.", "")
        if needs.sinks:
            return f"has no attention sinks (sink_token_length={needs.sinks})"
        if needs.block_size % self.block_multiple:
            return f"needs a block_size that is a multiple of {self.block_multiple}, not {needs.block_size}"
        for shape in needs.heads:
            if shape.key_dim != shape.value_dim:
                return f"needs keys as wide as values, not heads of {shape.key_dim} and {shape.value_dim}"
            if not self.supports_head_dim(shape.key_dim):
                return f"does not support heads of {shape.key_dim}"
        return None


def open_attention(device: torch.device, options: RunnerOptions) -> Attention | None:
    """Return the backend of `options.attention_backend`; None on a CPU, where plain torch operations are used.

    "auto" is the Triton kernel, because nothing else has been measured. Raises `UnsupportedOption` if a named backend
    cannot run here: on a CPU, or if its package is missing or too old.
    """
    name = options.attention_backend
    if device.type != "cuda":
        if name != "auto":
            raise UnsupportedOption(f"attention_backend: {name} needs a GPU, this is {device.type}; use auto")
        return None
    from neso.engine.runners.torch.triton_attention import paged_attention

    if name == "flash_attn":
        from neso.engine.runners.torch.flash_attention import FlashAttention

        return FlashAttention(paged_attention)
    if name == "flashinfer":
        from neso.engine.runners.torch.flashinfer_attention import FlashInferAttention

        return FlashInferAttention(paged_attention, device)
    return paged_attention


def check_attention(attention: Attention, needs: AttentionNeeds) -> None:
    """Raise `UnsupportedOption` if the backend cannot run the model. The Triton kernel runs every model."""
    if isinstance(attention, AttentionBackend):
        attention.check(needs)
