"""Attacks on real server processes. `./neso-test --all` runs them; `-s` shows the figures of each attack."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from attack import AttackedServer, write_identity_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def identity_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    """A server with default limits and the Python models `identity` (FP32) and `strings` (BYTES)."""
    repository = tmp_path_factory.mktemp("repository")
    write_identity_model(repository)
    write_identity_model(repository, "strings", "TYPE_STRING")
    with AttackedServer(repository=repository) as server:
        yield server
