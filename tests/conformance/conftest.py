"""One server with the shipped model for all conformance tests that do not need a special one."""

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
    """`neso serve` without any model named: the shipped one."""
    with ServerProcess() as process:
        assert process.ports, process.output
        yield process


@pytest.fixture(scope="session")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """As `server`, with an engine whose steps take 50 ms: what is long is still at work when that matters."""
    with ServerProcess(environment=slow_environment(tmp_path_factory.mktemp("slow"))) as process:
        assert process.ports, process.output
        yield process


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model in this process: what the server must answer, token by token."""
    return LLM(PILOT)
