"""A server with the bundled model for all conformance tests that need no special configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess
from step_pace import slow_environment

from neso.engine.client.llm import LLM
from neso.models import SHIPPED_MODELS

PILOT = SHIPPED_MODELS["neso-pilot"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.conformance)


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """`neso serve` without a model argument: the bundled model."""
    with ServerProcess() as process:
        assert process.ports, process.output
        yield process


@pytest.fixture(scope="session")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Like `server`, with steps of 50 ms, so that long requests are still running when a test acts."""
    with ServerProcess(environment=slow_environment(tmp_path_factory.mktemp("slow"))) as process:
        assert process.ports, process.output
        yield process


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model in this process, as the token-by-token reference."""
    return LLM(PILOT)
