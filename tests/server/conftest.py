"""Fixtures: a repository in a temporary folder, and cores that serve it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from repository_builder import RepositoryBuilder

from neso.server.core import Core
from neso.server.options import ModelControlMode, ServerOptions

StartCore = Callable[..., Awaitable[Core]]


@pytest.fixture
def repository(tmp_path: Path) -> RepositoryBuilder:
    return RepositoryBuilder(tmp_path / "models")


@pytest.fixture
async def start_core(repository: RepositoryBuilder) -> AsyncIterator[StartCore]:
    """`await start_core(explicit=…, poll=…, option=…)` returns a started core, which is stopped at the end.

    With `poll` it polls the repository on request.
    """
    cores: list[Core] = []

    async def start(*, explicit: bool = False, poll: bool = False, **options: Any) -> Core:
        options.setdefault("model_repository", (repository.path,))
        mode = ModelControlMode.EXPLICIT if explicit else ModelControlMode.NONE
        if poll:
            mode = ModelControlMode.POLL
            options.setdefault("repository_poll_secs", 0)
        core = Core(ServerOptions(model_control_mode=mode, **options))
        cores.append(core)
        await core.start()
        return core

    yield start
    for core in cores:
        await core.stop()
