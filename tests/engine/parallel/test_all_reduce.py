"""Sums over ranks in shared memory; the ranks are threads here."""

import threading

import numpy as np
import pytest

import neso._native as _native


def aligned(size: int) -> np.ndarray:
    memory = np.zeros(size + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:size]


def sum_on_threads(parts: list[np.ndarray], piece: int, repeats: int = 1) -> list[np.ndarray]:
    """Return the result of each rank after `repeats` sums of its values."""
    segments = [aligned(_native.SharedAllReduce.segment_bytes(piece)) for _ in parts]
    results = [[] for _ in parts]

    def run(rank: int) -> None:
        sums = _native.SharedAllReduce(segments, rank, piece)
        for repeat in range(repeats):
            values = parts[rank] * np.float32(repeat + 1)
            sums.sum(values)
            results[rank].append(values)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return [np.stack(found) for found in results]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("count", [1, 17, 1000, 5000])
def test_all_ranks_get_the_same_sum(ranks, count):
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=count).astype(np.float32) for _ in range(ranks)]
    results = sum_on_threads(parts, piece=1024, repeats=5)
    for result in results[1:]:
        assert (result == results[0]).all()
    for repeat in range(5):
        np.testing.assert_allclose(results[0][repeat], sum(parts) * (repeat + 1), rtol=1e-5, atol=1e-5)


def test_empty_sum_needs_no_other_rank():
    segments = [aligned(_native.SharedAllReduce.segment_bytes(16)) for _ in range(2)]
    _native.SharedAllReduce(segments, 0, 16).sum(np.empty(0, np.float32))


def test_small_or_unaligned_segments_are_refused():
    small = aligned(_native.SharedAllReduce.segment_bytes(16) - 1)
    good = aligned(_native.SharedAllReduce.segment_bytes(16) + 1)
    with pytest.raises(ValueError, match="small"):
        _native.SharedAllReduce([small, good], 0, 16)
    with pytest.raises(ValueError, match="aligned"):
        _native.SharedAllReduce([good, good[1:]], 0, 16)
