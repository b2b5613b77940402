"""The choice of tests and cases for the default tier."""

from __future__ import annotations

import re
from itertools import combinations, product
from pathlib import Path

import pytest
from pairwise import pairwise_cover
from slow_tests import listed


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2, 4), (5, 5, 5), (2, 3, 4, 5), (7, 1, 3)])
def test_every_pair_of_values_is_covered(sizes):
    cases = list(product(*map(range, sizes)))
    chosen = [cases[position] for position in pairwise_cover(cases)]
    for i, j in combinations(range(len(sizes)), 2):
        assert {(case[i], case[j]) for case in chosen} == set(product(range(sizes[i]), range(sizes[j])))
    assert len(chosen) <= len(cases)


def test_cover_is_much_smaller_than_the_matrix():
    assert len(pairwise_cover(list(product(range(5), repeat=4)))) < 50


def test_incomplete_matrices():
    cases = [(0, 0, 0), (0, 1, 1), (1, 0, 1)]
    assert pairwise_cover(cases) == {0, 1, 2}
    assert pairwise_cover([]) == set()


TESTS = Path(__file__).parent
pytest_plugins = ["pytester"]


MATRICES = """
import pytest

@pytest.mark.pairwise
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("c", range(4))
def test_costly(a, b, c): pass

@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("c", range(4))
def test_cheap(a, b, c): pass

@pytest.mark.pairwise
@pytest.mark.parametrize("a", range(30))
@pytest.mark.parametrize("b", range(2))
def test_two_axes(a, b): pass
"""
HOOKS = """
from pairwise import thin_matrices

def pytest_addoption(parser):
    parser.addoption("--matrices", action="store_true")

def pytest_collection_modifyitems(config, items):
    config.hook.pytest_deselected(items=thin_matrices(items, config.getoption("--matrices")))
"""
COVER = len(pairwise_cover(list(product(range(4), repeat=3))))


@pytest.mark.parametrize(
    ("arguments", "passed", "left_out"),
    [
        ([], COVER + 64 + 60, 64 - COVER),
        (["-m", "not slow"], COVER + COVER + 60, 2 * (64 - COVER)),
        (["--matrices"], 64 + 64 + 60, 0),
    ],
    ids=["all", "fast", "matrices"],
)
def test_only_marked_matrices_are_thinned(pytester, arguments, passed, left_out):
    pytester.makeini("[pytest]\nmarkers =\n    pairwise\n    slow")
    pytester.makeconftest(HOOKS)
    pytester.makepyfile(MATRICES)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
    result.assert_outcomes(passed=passed, deselected=left_out)


def test_listed_tests_exist():
    functions = {
        name for path in TESTS.rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    stale = []
    for name in listed():
        path, *_, function = name.partition("[")[0].split("::")
        if not (TESTS.parent / path).is_file() or function not in functions | {"runTest"}:
            stale.append(name)
    assert not stale, "remove them from tests/slow_tests.txt"
