"""A server in this process that is to survive whatever the tests send.

NESO_FUZZ_EXAMPLES is how many examples each test tries: 40 by default, thousands for a long run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from fuzz_server import FuzzServer

EXAMPLES = int(os.environ.get("NESO_FUZZ_EXAMPLES", "40"))

settings.register_profile(
    "fuzz",
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.data_too_large,
    ],
    print_blob=True,
)
settings.load_profile("fuzz")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(60 + EXAMPLES))
            if EXAMPLES > 100:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzServer]:
    """One for the tests of a file; at the end nothing may be left of all the requests."""
    with FuzzServer(tmp_path_factory.mktemp("fuzz")) as running:
        yield running
        running.check_idle()
