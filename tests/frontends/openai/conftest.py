"""A core with scripted models, and its OpenAI API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from asgi_client import AsgiClient
from scripted_model import ScriptedBackend, ScriptedModel
from starlette.applications import Starlette
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.frontends.openai import OpenAIOptions, create_app
from neso.server import backend
from neso.server.core import Core
from neso.server.options import ServerOptions

MODEL = "scripted"
NOT_LANGUAGE = "adder"


@pytest.fixture
def script() -> ScriptedModel:
    """The model served as `MODEL`."""
    return ScriptedModel()


@pytest.fixture
async def core(tmp_path: Path, script: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Core]:
    """A core with a language model and another model."""
    monkeypatch.setitem(backend.BUILTIN, "scripted", "scripted_model:ScriptedBackend")
    monkeypatch.setattr(ScriptedBackend, "scripts", {MODEL: script})
    core = Core(ServerOptions((), exit_timeout=1.0))
    for name in (MODEL, NOT_LANGUAGE):
        core.add_model(name, ModelConfig(name=name, backend="scripted"), tmp_path)
    await core.start()
    yield core
    await core.stop()


@pytest.fixture
def app(core: Core) -> Starlette:
    return create_app(core, OpenAIOptions(max_body_size=100_000))


@pytest.fixture
def client(app: Starlette) -> AsgiClient:
    return AsgiClient(app)
