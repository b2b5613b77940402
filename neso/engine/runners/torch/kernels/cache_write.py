"""Writes new keys and values into the paged cache, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from neso.engine.runners.torch.kv_cache import LayerCache


@triton.jit
def _store(target, source, slots, source_stride, width, PADDED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    slot = tl.load(slots + token).to(tl.int64)
    values = tl.load(source + token * source_stride + columns, mask=columns < width)
    tl.store(target + slot * width + columns, values, mask=columns < width)


def store(keys: Tensor, values: Tensor, slots: Tensor, cache: LayerCache) -> None:
    """See `Operations.store`. The heads of a token must lie together."""
    for source, target in ((keys, cache.keys), (values, cache.values)):
        tokens, heads, dim = source.shape
        if tokens:
            width = heads * dim
            _store[(tokens,)](
                target,
                source,
                slots,
                source.stride(0),
                width,
                PADDED=triton.next_power_of_2(width),
                num_warps=2,
            )
