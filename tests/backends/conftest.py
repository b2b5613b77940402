"""Fixtures: helpers of the server tests, and cores that serve one model from given files."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from neso.server.core import Core
from neso.server.options import ServerOptions

ServeFiles = Callable[..., Awaitable[Core]]


@pytest.fixture
async def serve_files(tmp_path: Path) -> AsyncIterator[ServeFiles]:
    """`await serve_files(config, files, option=…)` returns a core with the model "model"; `files` belong to version 1.

    Without a config there is no config.pbtxt. The model may have failed to load: `reason(core)`.
    """
    cores: list[Core] = []

    async def start(config: str | None, files: dict[str, bytes], **options: Any) -> Core:
        folder = tmp_path / f"models{len(cores)}" / "model"
        (folder / "1").mkdir(parents=True)
        if config is not None:
            (folder / "config.pbtxt").write_text(config)
        for name, data in files.items():
            path = folder / "1" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        core = Core(ServerOptions((folder.parent,), exit_timeout=1, **options))
        cores.append(core)
        await core.start()
        return core

    yield start
    for core in cores:
        await core.stop()
