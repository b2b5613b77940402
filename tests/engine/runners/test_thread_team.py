"""The thread team of the native runner: every chunk of every loop runs once, even if threads are late."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neso import _native

COUNTS = st.lists(st.integers(0, 40), max_size=30)


@given(counts=COUNTS, threads=st.integers(1, 9), calls=st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_each_chunk_runs_once_per_call(counts: list[int], threads: int, calls: int) -> None:
    assert _native.count_chunks(counts, threads, calls) == [calls] * sum(counts)


@given(counts=COUNTS, threads=st.integers(2, 5))
@settings(deadline=None, max_examples=20)
def test_late_threads_do_not_delay_others(counts: list[int], threads: int) -> None:
    """The other threads start when the first has finished all loops, and find no work."""
    assert _native.count_chunks(counts, threads, calls=2, alone=True) == [2] * sum(counts)


def test_many_more_threads_than_cores() -> None:
    assert _native.count_chunks([64, 1, 0, 7] * 50, 32, calls=10) == [10] * (72 * 50)


def test_zero_threads_are_rejected() -> None:
    with pytest.raises(ValueError, match="there must be a thread"):
        _native.count_chunks([1], 0)
