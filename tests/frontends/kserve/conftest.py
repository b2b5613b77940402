"""Runs the tests of both protocols on the event loop of the server."""

from __future__ import annotations

from typing import Any

import pytest
import uvloop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    """The server's event loop."""
    return {"uvloop": uvloop.new_event_loop}
