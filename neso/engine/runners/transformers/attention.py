"""Our paged attention, as transformers' models call it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from neso.engine.runners.torch.kv_cache import HeadShape, KVCache
from neso.engine.runners.torch.operations import Operations
from neso.engine.runners.torch.step_inputs import StepInputs
from neso.engine.specs.errors import UnsupportedModel

NAME = "neso_paged"
"""What `attn_implementation` is called; transformers makes no mask for it."""


class LayerAttention(Protocol):
    def __call__(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        scale: float,
        cap: float,
    ) -> Tensor:
        """queries[T, heads, D], keys[T, kv_heads, D], values[T, kv_heads, E] -> [T, heads, E]."""


_active: ContextVar[LayerAttention] = ContextVar("attention of the step that runs")


@contextmanager
def attending(attention: LayerAttention) -> Iterator[None]:
    """All attention of models in this thread goes to `attention`."""
    token = _active.set(attention)
    try:
        yield
    finally:
        _active.reset(token)


def _called_by_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query[1, heads, T, D], key and value [1, kv_heads, T, D]: a flat batch. Gives [1, T, heads, D]."""
    for name in ("s_aux", "position_bias"):
        if options.get(name) is not None:
            raise UnsupportedModel(f"attention with {name} is not supported for models run by transformers")
    if not getattr(module, "is_causal", True) or attention_mask is not None:
        raise UnsupportedModel("only causal attention is supported for models run by transformers")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    attended = _active.get()(layer, query, key, value, sliding_window, scale, softcap or 0.0)
    return attended[None], None


AttentionInterface.register(NAME, _called_by_transformers)


class PagedAttention:
    """Attention over the cache, for one step."""

    def __init__(self, inputs: StepInputs, cache: KVCache, operations: Operations) -> None:
        self._inputs, self._cache, self._operations = inputs, cache, operations

    def __call__(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        scale: float,
        cap: float,
    ) -> Tensor:
        cache = self._cache.layers[layer]
        self._operations.store(keys.contiguous(), values.contiguous(), self._inputs.slots, cache)
        return self._operations.attention(queries.contiguous(), cache, self._inputs, window, scale, cap)


class HeadProbe:
    """Learns from one token what the layers' heads look like, which no field of config.json says for all models."""

    def __init__(self) -> None:
        self.shapes: dict[int, HeadShape] = {}

    def __call__(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        scale: float,
        cap: float,
    ) -> Tensor:
        if layer in self.shapes:
            raise UnsupportedModel(f"layer {layer} attends more than once, which is not supported")
        self.shapes[layer] = HeadShape(keys.shape[1], keys.shape[2], values.shape[2])
        return torch.zeros(*queries.shape[:2], values.shape[2], dtype=values.dtype, device=values.device)
