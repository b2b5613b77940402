"""Where there is no GPU, Triton interprets its kernels: that must be said before they are imported. And the log."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import HealthCheck, settings
from step_pace import StepPace
from virtual_time import VirtualTime

from neso.engine.runners.registry import has_nvidia_gpu

if not has_nvidia_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long examples take to make and to run says more of the machine than of what is tested.
settings.register_profile("neso", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("neso")


# Files of a single test that takes minutes. Files with many tests are handed out first, so these would run at the very
# end, alone.
LONGEST = ("test_install_size.py", "test_random_schemas.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, then those with most tests: for `--dist loadfile --no-loadscope-reorder`."""
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONGEST, -counts[item.path]))


@pytest.fixture
def same_log() -> Iterator[None]:
    """Whatever the test changes of the process's log is undone."""
    from neso.server.log import LogOptions, log_settings

    yield
    log_settings().options = LogOptions()
    logging.getLogger("neso").setLevel(logging.NOTSET)


@pytest.fixture
def step_pace(monkeypatch: pytest.MonkeyPatch) -> StepPace:
    """Engines of this process are slow: who shall be met at work is met, and not at its end."""
    return StepPace(monkeypatch)


@pytest.fixture
async def virtual_time() -> AsyncIterator[VirtualTime]:
    """The test's event loop has a clock that jumps to the next timer when nobody has anything to do."""
    with pytest.MonkeyPatch.context() as patch:
        yield VirtualTime(patch)
