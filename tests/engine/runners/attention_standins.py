"""Stand-ins of the modules `flash_attn` and `flashinfer`: their public functions in plain torch.

Names and defaults of arguments are those of flash-attn 2.8 and flashinfer-python 0.7. They are strict about what the
libraries demand: dtypes, shapes, strides, the device of each argument, and the order of calls.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    assert block_table is not None and causal and softmax_scale is not None
    assert dropout_p == 0 and alibi_slopes is None and not return_attn_probs
    sequences, page_size = len(cu_seqlens_q) - 1, k.shape[1]
    _check_heads(q, k, v)
    assert page_size % 256 == 0 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    for tensor in (cu_seqlens_q, cu_seqlens_k):
        assert tensor.dtype == torch.int32 and tensor.shape == (sequences + 1,) and tensor.is_contiguous()
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
    assert len(block_table) == sequences and (block_table >= 0).all() and (block_table < len(k)).all()
    counts, contexts = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert isinstance(max_seqlen_q, int) and isinstance(max_seqlen_k, int)
    assert (max_seqlen_q, max_seqlen_k) == (max(counts), max(contexts))
    assert int(cu_seqlens_q[-1]) == len(q)
    left, right = window_size
    assert window_size == (-1, -1) or (left >= 0 and right == 0)
    pages = [row[: -(-context // page_size)] for row, context in zip(block_table, contexts, strict=True)]
    return _attend(q, k, v, counts, contexts, pages, softmax_scale, left, softcap)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any()
        assert kv_layout == "NHD" and not use_cuda_graph and backend == "auto"
        self.num_plans = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        sequences = len(qo_indptr) - 1
        assert causal and sm_scale is not None and head_dim_qk in (64, 128, 256)
        for tensor, length in (
            (qo_indptr, sequences + 1),
            (paged_kv_indptr, sequences + 1),
            (paged_kv_indices, int(paged_kv_indptr[-1])),
            (paged_kv_last_page_len, sequences),
        ):
            assert tensor.dtype == torch.int32 and tensor.shape == (length,) and tensor.is_contiguous()
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
            assert tensor.device.type == "cpu"
        assert (paged_kv_last_page_len >= 1).all() and (paged_kv_last_page_len <= page_size).all()
        self.num_plans += 1
        self._shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._dtypes = (q_data_type, kv_data_type)
        self._counts = qo_indptr.diff().tolist()
        num_pages = paged_kv_indptr.diff()
        self._contexts = ((num_pages - 1) * page_size + paged_kv_last_page_len).tolist()
        assert all(count <= context for count, context in zip(self._counts, self._contexts, strict=True))
        self._pages = list(paged_kv_indices.split(num_pages.tolist()))
        self._scores = (sm_scale, window_left, logits_soft_cap or 0.0)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert q.is_contiguous() and keys.is_contiguous() and values.is_contiguous()
        _check_heads(q, keys, values)
        assert (q.shape[1], keys.shape[2], q.shape[2], keys.shape[1]) == self._shape
        assert (q.dtype, keys.dtype) == self._dtypes and len(q) == sum(self._counts)
        assert all((pages >= 0).all() and (pages < len(keys)).all() for pages in self._pages)
        return _attend(q, keys, values, self._counts, self._contexts, self._pages, *self._scores)


def _check_heads(q: Tensor, keys: Tensor, values: Tensor) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16) and keys.dtype == values.dtype == q.dtype
    assert q.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    assert q.shape[1] % keys.shape[2] == 0 and keys.shape == values.shape
    assert q.shape[2] == keys.shape[3]


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    counts: list[int],
    contexts: list[int],
    pages: list[Tensor],
    scale: float,
    left: int,
    softcap: float,
) -> Tensor:
    """Causal attention in float32; the mask is aligned to the bottom right corner. `left` -1: no window.

    Reads no key that is before the window of the first query.
    """
    out = []
    for queries, context, blocks in zip(q.split(counts), contexts, pages, strict=True):
        oldest = max(context - len(queries) - left, 0) if left >= 0 else 0
        k, v = (part[blocks.long()].flatten(0, 1)[oldest:context].float() for part in (keys, values))
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", queries.float(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(context - len(queries), context)[:, None] - torch.arange(oldest, context)
        visible = (distance >= 0) & ((distance <= left) if left >= 0 else True)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(out).to(q.dtype)


def modules() -> dict[str, ModuleType]:
    """Return the modules by name, for `sys.modules`."""
    contents: dict[str, Any] = {
        "flash_attn": flash_attn_varlen_func,
        "flashinfer": BatchPrefillWithPagedKVCacheWrapper,
    }
    found = {}
    for name, content in contents.items():
        found[name] = ModuleType(name)
        setattr(found[name], content.__name__, content)
    return found
