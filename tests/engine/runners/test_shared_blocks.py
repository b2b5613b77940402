"""Copies of the torch runner's blocks in memory that other processes can map."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from neso.engine.runners.base import CacheLayout  # noqa: E402
from neso.engine.runners.torch import kv_cache  # noqa: E402
from neso.engine.runners.torch.kv_cache import HeadShape, KVCache  # noqa: E402

BLOCKS, SIZE, HEADS, DIM, LAYERS = 9, 4, 2, 8, 3


def make_cache(dtype: torch.dtype) -> KVCache:
    layout = CacheLayout(BLOCKS, SIZE, shared=True)
    return KVCache([HeadShape(HEADS, DIM, DIM)] * LAYERS, layout, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_blocks", [1, 2, 100])
def test_blocks_return_unchanged(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, max_blocks: int):
    block_bytes = LAYERS * 2 * SIZE * HEADS * DIM * dtype.itemsize
    monkeypatch.setattr(kv_cache, "_PIECE_BYTES", max_blocks * block_bytes)
    cache = make_cache(dtype)
    assert cache.shared is not None
    parts = [part for layer in cache.layers for part in (layer.keys, layer.values)]
    for part in parts:
        part.copy_(torch.randn(part.shape))
    expected = [part.clone() for part in parts]
    blocks = [7, 0, 3]
    cache.shared.store(blocks)
    cache.shared.store([])
    for part in parts:
        part.zero_()
    cache.shared.load(blocks)
    for part, values in zip(parts, expected, strict=True):
        torch.testing.assert_close(part[blocks], values[blocks], rtol=0, atol=0)
        others = [block for block in range(BLOCKS) if block not in blocks]
        assert not part[others].any()


def test_too_little_host_memory_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 100)
    with pytest.raises(OSError, match="take 13824 bytes of host memory, 100 are available"):
        make_cache(torch.float32)
