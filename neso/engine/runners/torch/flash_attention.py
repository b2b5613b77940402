"""Attention by the package `flash-attn` (FlashAttention 2), `attention_backend: flash_attn`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from neso.engine.runners.runner_options import UnsupportedOption
from neso.engine.runners.torch.attention import Attention, AttentionBackend
from neso.engine.runners.torch.kv_cache import LayerCache
from neso.engine.runners.torch.step_inputs import StepInputs

_PARAMETERS = frozenset({"block_table", "softcap", "window_size"})


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Of the sequences of a step: `context_start` int32[S + 1] is the sum of the lengths of earlier sequences."""

    inputs: StepInputs
    context_start: Tensor
    block_tables: Tensor
    max_new: int
    max_context: int

    @classmethod
    def of(cls, inputs: StepInputs) -> _Lengths:
        plan = inputs.plan
        new = np.diff(plan.query_start)
        contexts = inputs.num_computed + inputs.query_start.diff()
        return cls(
            inputs,
            functional.pad(contexts.cumsum(0, dtype=torch.int32), (1, 0)),
            # Entries behind the end of a sequence are -1. They are not read, but would be invalid addresses.
            inputs.block_tables.clamp(min=0),
            int(new.max()),
            int((plan.num_computed + new).max()),
        )


class FlashAttention(AttentionBackend):
    """Calls `flash_attn_varlen_func` with block tables.

    Not `flash_attn_with_kvcache`: with block tables, version 2.8.4 waits for the lengths on the host in each layer.
    """

    name = "flash_attn"
    block_multiple = 256

    def __init__(self, fallback: Attention) -> None:
        super().__init__(fallback)
        self._attend = _import_function()
        self._lengths: _Lengths | None = None

    def supports_head_dim(self, head_dim: int) -> bool:
        return head_dim <= 256 and head_dim % 8 == 0

    def attend(
        self,
        queries: Tensor,
        cache: LayerCache,
        inputs: StepInputs,
        window: int | None,
        scale: float,
        softcap: float,
    ) -> Tensor:
        lengths = self._lengths
        if lengths is None or lengths.inputs is not inputs:
            # The layers of a step share them.
            self._lengths = lengths = _Lengths.of(inputs)
        return self._attend(
            queries,
            cache.keys,
            cache.values,
            cu_seqlens_q=inputs.query_start,
            cu_seqlens_k=lengths.context_start,
            max_seqlen_q=lengths.max_new,
            max_seqlen_k=lengths.max_context,
            softmax_scale=scale,
            causal=True,
            # Keys to the left and to the right of a token, without the token itself; -1: all.
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap,
            block_table=lengths.block_tables,
        )


def _import_function() -> Callable[..., Tensor]:
    """Raises `UnsupportedOption` if the package is missing, too old, or is not for this GPU."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise UnsupportedOption(
            f"attention_backend: flash_attn needs `pip install flash-attn`, version 2.6 or later: {error}"
        ) from None
    function: Callable[..., Tensor] = flash_attn_varlen_func
    if missing := _PARAMETERS - signature(function).parameters.keys():
        raise UnsupportedOption(
            f"attention_backend: flash_attn needs flash-attn 2.6 or later, this version has no {min(missing)}"
        )
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        raise UnsupportedOption(
            "attention_backend: flash_attn needs a GPU of compute capability 8.0 or later"
        )
    return function
