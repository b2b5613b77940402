"""Fixtures of the tests of both protocols, which run on the event loop of the server."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2] / "server" / "tracing"))

from trace_reader import ReadTrace, read_traces

from neso.server.core import Core
from neso.server.tracing import TraceConfig, Tracing


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    """The server's event loop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def written(core: Core, tmp_path: Path) -> Callable[[], Awaitable[list[ReadTrace]]]:
    """Trace every request. `await written()` stops tracing and returns the traces."""
    settings = [f"triton,file={tmp_path}/trace.json", "rate=1", "level=TIMESTAMPS"]
    tracing = core.tracing = Tracing(TraceConfig.parse(settings))

    async def written() -> list[ReadTrace]:
        await tracing.close()
        path = tmp_path / "trace.json"
        return read_traces(path) if path.exists() else []

    return written
