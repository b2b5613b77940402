"""Fixtures: a core that serves one Python model."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "server"))

from repository_builder import IDENTITY_TENSORS, RepositoryBuilder

from neso.server.core import Core
from neso.server.model import Model
from neso.server.options import ServerOptions

Serve = Callable[..., Awaitable[Model]]


@pytest.fixture(params=["thread", "process"])
def execution_mode(request: pytest.FixtureRequest) -> str:
    """Models must not be able to tell the modes apart."""
    return request.param


@pytest.fixture
def python_options(execution_mode: str) -> dict[str, dict[str, str]]:
    """Return the `backend_config` of a server that runs Python models in this mode."""
    return {"python": {"execution-mode": execution_mode}}


@pytest.fixture
async def serve(tmp_path: Path, python_options: dict[str, dict[str, str]]) -> AsyncIterator[Serve]:
    """`await serve(code, config)` returns a core with the loaded model; `files` are written to its version folder."""
    cores: list[Core] = []

    async def start(code: str, config: str = IDENTITY_TENSORS, files: dict[str, str] | None = None) -> Model:
        repository = RepositoryBuilder(tmp_path / f"models{len(cores)}")
        folder = repository.add("model", code, config)
        for name, text in (files or {}).items():
            (folder / "1" / name).parent.mkdir(exist_ok=True)
            (folder / "1" / name).write_text(text)
        core = Core(ServerOptions((repository.path,), exit_timeout=1, backend_config=python_options))
        cores.append(core)
        await core.start()
        (entry,) = core.repository_index()
        assert not entry.reason, entry.reason
        return core.model("model")

    yield start
    for core in cores:
        await core.stop()
