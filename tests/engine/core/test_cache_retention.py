"""Eviction order of cached blocks: by priority while its duration lasts, then by age."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from neso.engine.core import block_pool as free_blocks
from neso.engine.core.block_pool import BlockPool, FreeBlocks
from neso.generation import InvalidParameter
from neso.generation.request import CacheRetention, RetainedRange


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(free_blocks.time, "monotonic", lambda: now[0])
    return now


def filled(num_blocks: int) -> BlockPool:
    """Return a pool with all blocks allocated."""
    pool = BlockPool(num_blocks)
    assert [pool.allocate() for _ in range(num_blocks)] == list(range(num_blocks))
    return pool


def test_reuse_order():
    pool = filled(6)
    pool.retain(0, 100, None)
    pool.retain(2, 0, None)
    pool.retain(4, 100, None)
    for block in (4, 0, 3, 1, 2):
        pool.release(block, content_cached=True)
    pool.release(5, content_cached=False)
    assert [pool.allocate() for _ in range(6)] == [5, 2, 3, 1, 4, 0]
    with pytest.raises(KeyError):
        pool.allocate()


def test_a_priority_lasts_until_the_content_is_evicted():
    pool = filled(2)
    pool.retain(0, 80, None)
    for _ in range(2):
        pool.release(0, content_cached=True)
        pool.share(0)
    pool.release(0, content_cached=True)
    pool.release(1, content_cached=True)
    assert (pool.allocate(), pool.allocate()) == (1, 0)
    pool.release(0, content_cached=True)
    pool.release(1, content_cached=True)
    assert (pool.allocate(), pool.allocate()) == (0, 1)


def test_a_priority_expires(clock):
    pool = filled(3)
    pool.retain(0, 90, 10.0)
    pool.retain(1, 90, 30.0)
    for block in (0, 1, 2):
        pool.release(block, content_cached=True)
    clock[0] += 20
    assert [pool.allocate() for _ in range(3)] == [2, 0, 1]


def test_a_duration_can_be_renewed(clock):
    pool = filled(2)
    pool.retain(0, 90, 10.0)
    clock[0] += 5
    pool.retain(0, 90, 10.0)
    pool.release(0, content_cached=True)
    clock[0] += 7
    pool.release(1, content_cached=True)
    assert pool.allocate() == 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "free", "drop", "share", "retain"]),
            st.integers(0, 7),
            st.integers(0, 100),
        ),
        max_size=60,
    )
)
def test_no_block_is_lost(actions):
    free = FreeBlocks(8)
    held: set[int] = set()
    for action, block, priority in actions:
        if action == "take" and len(free):
            taken = free.take()
            assert taken not in held
            held.add(taken)
        elif action in ("free", "drop") and block in held:
            held.remove(block)
            free.add(block, content_cached=action == "free")
        elif action == "share" and block in free:
            free.remove(block)
            held.add(block)
        elif action == "retain" and block in held:
            free.retain(block, priority, None if priority % 2 else 0.0)
        assert len(free) == 8 - len(held) and all((b in free) != (b in held) for b in range(8))
    assert len({free.take() for _ in range(len(free))}) == 8 - len(held)


def test_token_ranges():
    retention = CacheRetention([RetainedRange(0, 32, 90), RetainedRange(48, None, 10, 500)], 20, 70)
    places = {position: retention.at(position, 64) for position in (0, 31, 32, 48, 63, 64)}
    assert places == {
        0: (90, None),
        31: (90, None),
        32: None,
        48: (10, 500),
        63: (10, 500),
        64: (20, 70),
    }


@pytest.mark.parametrize(
    ("ranges", "decode", "field"),
    [
        ([RetainedRange(0, 0)], 35, "retention_token_range_ends"),
        ([RetainedRange(-1, 5)], 35, "retention_token_range_ends"),
        ([RetainedRange(0, 5, 101)], 35, "retention_token_range_priorities"),
        ([RetainedRange(0, 5, 1, -5)], 35, "retention_token_range_durations_ms"),
        ([RetainedRange(i, i + 1) for i in range(257)], 35, "retention_token_range_starts"),
        ([], -1, "retention_decode_priority"),
    ],
)
def test_invalid_ranges_name_their_field(ranges, decode, field):
    with pytest.raises(InvalidParameter) as refused:
        CacheRetention(ranges, decode)
    assert refused.value.field == field


def test_expirations_of_evicted_blocks_are_removed():
    free = FreeBlocks(8)
    for _ in range(1000):
        block = free.take()
        free.retain(block, 90, 1e6)
        free.add(block, content_cached=True)
    assert len(free._ends) <= 16
