"""Fuzz tests against a server in the test process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from fuzz_profile import EXAMPLES
from fuzz_server import FuzzServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(60 + EXAMPLES))
            if EXAMPLES > 100:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzServer]:
    """One server per file; no request may remain at the end."""
    with FuzzServer(tmp_path_factory.mktemp("fuzz")) as running:
        yield running
        running.check_idle()
