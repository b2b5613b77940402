"""Fixtures and settings shared by all tests."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import HealthCheck, settings
from pairwise import thin_matrices
from slow_tests import SlowTestsWriter, mark_listed_slow
from step_pace import StepPace
from virtual_time import VirtualTime

from neso.engine.runners.registry import has_nvidia_gpu

if not has_nvidia_gpu():
    # Triton interprets kernels on the CPU. It reads the variable when they are imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Derandomized: runs are reproducible. `--hypothesis-profile=random` searches for new examples.
settings.register_profile(
    "default", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("random", settings.get_profile("default"), derandomize=False)
settings.load_profile("default")


# Files with a single test that takes minutes. They start first, so that they do not run alone at the end.
LONGEST = ("test_install_size.py", "test_random_schemas.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-slow-tests", type=float, metavar="SECONDS", help="write tests/slow_tests.txt")
    parser.addoption("--matrices", action="store_true", help="run all cases of tests with the mark pairwise")


def pytest_configure(config: pytest.Config) -> None:
    seconds = config.getoption("--write-slow-tests")
    if seconds is not None and not hasattr(config, "workerinput"):  # not in pytest-xdist workers
        config.pluginmanager.register(SlowTestsWriter(seconds))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from scanning modules and thousands of test items in every collection."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin matrices, mark slow tests and order files.

    Order, for `--dist loadfile --no-loadscope-reorder`: longest files first, then by number of tests.
    """
    config.hook.pytest_deselected(items=thin_matrices(items, complete=config.getoption("--matrices")))
    mark_listed_slow(items)
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONGEST, -counts[item.path]))


@pytest.fixture(autouse=True)
def _restore_log() -> Iterator[None]:
    """Undo changes that the test makes to the process's log settings."""
    from neso.server.log import LogOptions, log_settings

    root = logging.getLogger()
    level = root.level
    yield
    if log_settings().options != LogOptions():
        log_settings().options = LogOptions()
    logging.getLogger("neso").setLevel(logging.NOTSET)
    root.setLevel(level)


@pytest.fixture
def step_pace(monkeypatch: pytest.MonkeyPatch) -> StepPace:
    """Slow down the steps of engines in this process, so that requests are still running when a test acts."""
    return StepPace(monkeypatch)


@pytest.fixture
async def virtual_time() -> AsyncIterator[VirtualTime]:
    """Give the test's event loop a clock that jumps to the next timer when the loop is idle."""
    with pytest.MonkeyPatch.context() as patch:
        yield VirtualTime(patch)
