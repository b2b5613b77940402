"""Choose subsets of large parameter matrices: for the default tier, and for tests with the mark `pairwise`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import pytest

Case = tuple[int, ...]
MIN_AXES = 3
MIN_CASES = 24


def pairwise_cover(cases: Sequence[Case]) -> set[int]:
    """Return positions of cases that together cover every pair of values in `cases`.

    Greedy: the next case is the first one with the most pairs that are not covered yet.
    """
    pairs = [{((i, case[i]), (j, case[j])) for i, j in combinations(range(len(case)), 2)} for case in cases]
    uncovered = set().union(*pairs) if pairs else set()
    chosen: set[int] = set()
    while uncovered:
        best = max(range(len(cases)), key=lambda position: (len(pairs[position] & uncovered), -position))
        chosen.add(best)
        uncovered -= pairs[best]
    return chosen


def beyond_cover(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of large tests with three or more parameter axes that a pairwise cover does not need."""
    matrices: defaultdict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            owner = item.parent.nodeid if item.parent is not None else ""
            matrices[owner, item.originalname].append(item)
    beyond: list[pytest.Item] = []
    for cases in matrices.values():
        if len(cases) < MIN_CASES:
            continue
        names = sorted(cases[0].callspec.params)
        columns = [_numbered([repr(item.callspec.params[name]) for item in cases]) for name in names]
        # Parameters that always change together are one axis.
        axes = sorted({column for column in columns if len(set(column)) > 1})
        if len(axes) < MIN_AXES:
            continue
        kept = pairwise_cover(list(zip(*axes, strict=True)))
        beyond += [item for position, item in enumerate(cases) if position not in kept]
    return beyond


def thin_matrices(items: list[pytest.Item], complete: bool) -> list[pytest.Item]:
    """Remove from `items` what a pairwise cover of tests with the mark `pairwise` does not need, and return it.

    The same cases of other tests become slow. `complete`: mark all as slow and remove none.
    """
    beyond = beyond_cover(items)
    for item in beyond:
        item.add_marker(pytest.mark.slow)
    removed = [] if complete else [item for item in beyond if item.get_closest_marker("pairwise")]
    gone = set(removed)
    items[:] = [item for item in items if item not in gone]
    return removed


def _numbered(values: Sequence[str]) -> tuple[int, ...]:
    """Replace each value by the index of its first occurrence among the distinct values."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)
