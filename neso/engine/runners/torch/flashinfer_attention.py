"""Attention by the package `flashinfer-python`, `attention_backend: flashinfer`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.runner_options import UnsupportedOption
from neso.engine.runners.torch.attention import Attention, AttentionBackend
from neso.engine.runners.torch.kv_cache import LayerCache
from neso.engine.runners.torch.step_inputs import Int32Array, StepInputs, send_together

_WORKSPACE_BYTES = 128 << 20
"""The size that FlashInfer recommends."""


class Pages(NamedTuple):
    """Cache blocks that the sequences of a step attend to.

    Those of sequence s are indices[starts[s] : starts[s + 1]]; its last one has last_lengths[s] tokens.
    """

    starts: Int32Array
    indices: Int32Array
    last_lengths: Int32Array

    @classmethod
    def of(cls, plan: StepPlan, block_size: int, window: int | None) -> Pages:
        """Leave out the blocks before the window, which other sequences may own by now."""
        contexts = plan.num_computed + np.diff(plan.query_start)
        first = np.zeros_like(contexts)
        if window is not None:
            first = np.maximum(plan.num_computed - window + 1, 0) // block_size
        end = -(-contexts // block_size)
        column = np.arange(plan.block_tables.shape[1])
        used = (column >= first[:, None]) & (column < end[:, None])
        starts = np.concatenate([[0], np.cumsum(end - first)])
        last = contexts - (end - 1) * block_size
        return cls(starts.astype(np.int32), plan.block_tables[used], last.astype(np.int32))


class Kind(NamedTuple):
    """What a plan of FlashInfer holds for: attention of layers with these values."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    window: int | None
    scale: float
    softcap: float


class FlashInferAttention(AttentionBackend):
    """Calls `BatchPrefillWithPagedKVCacheWrapper`; layers of one `Kind` share the plan of a step."""

    name = "flashinfer"

    def __init__(self, fallback: Attention, device: torch.device) -> None:
        super().__init__(fallback)
        self._wrapper_class = _import_wrapper()
        self._device = device
        # Used while a layer runs, so all plans share it.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planned: dict[Kind, PlannedWrapper] = {}

    def supports_head_dim(self, head_dim: int) -> bool:
        return head_dim in (64, 128, 256)

    def attend(
        self,
        queries: Tensor,
        cache: LayerCache,
        inputs: StepInputs,
        window: int | None,
        scale: float,
        softcap: float,
    ) -> Tensor:
        _, block_size, kv_heads, head_dim = cache.keys.shape
        kind = Kind(queries.shape[1], kv_heads, head_dim, block_size, queries.dtype, window, scale, softcap)
        if kind not in self._planned:
            self._planned[kind] = PlannedWrapper(kind, self._wrapper_class(self._workspace, "NHD"))
        wrapper = self._planned[kind].prepare(inputs)
        # Queries lie next to keys and values, and FlashInfer promises nothing about such strides.
        attended: Tensor = wrapper.run(queries.contiguous(), (cache.keys, cache.values))
        return attended


class PlannedWrapper:
    """A wrapper of FlashInfer and the step that it is planned for."""

    def __init__(self, kind: Kind, wrapper: Any) -> None:
        self._kind, self._wrapper = kind, wrapper
        self._inputs: StepInputs | None = None
        self._copied: torch.cuda.Event | None = None

    def prepare(self, inputs: StepInputs) -> Any:
        """Return the wrapper, planned for a step."""
        if inputs is not self._inputs:
            if self._copied is not None:
                # The wrapper plans in one pinned buffer, which the GPU must have read. It reads it at the begin of a
                # step, so this waits for the begin of the previous step, not for its end.
                self._copied.synchronize()
            self._plan(inputs)
            self._inputs = inputs
            if inputs.query_start.device.type == "cuda":
                self._copied = torch.cuda.Event()
                self._copied.record()
        return self._wrapper

    def _plan(self, inputs: StepInputs) -> None:
        kind, plan = self._kind, inputs.plan
        pages = Pages.of(plan, kind.block_size, kind.window)
        (indices,) = send_together([pages.indices], inputs.query_start.device)
        # On the host, where FlashInfer reads all but the indices. Copies, because arrays of a plan are read-only.
        self._wrapper.plan(
            torch.from_numpy(plan.query_start.copy()),
            torch.from_numpy(pages.starts),
            indices,
            torch.from_numpy(pages.last_lengths),
            kind.heads,
            kind.kv_heads,
            kind.head_dim,
            kind.block_size,
            causal=True,
            sm_scale=kind.scale,
            # Keys to the left of a token, without the token itself; -1: all.
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.softcap,
            q_data_type=kind.dtype,
            kv_data_type=kind.dtype,
        )


def _import_wrapper() -> Any:
    """Raises `UnsupportedOption` if the package is missing or broken."""
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except ImportError as error:
        raise UnsupportedOption(
            f"attention_backend: flashinfer needs `pip install flashinfer-python`: {error}"
        ) from None
    return BatchPrefillWithPagedKVCacheWrapper
