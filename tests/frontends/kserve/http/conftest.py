"""Fixtures: a core with the test models, and an HTTP frontend on a free port."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kserve_backends import Wait
from kserve_http_backends import BACKENDS, CONFIGS

from neso.frontends.frontend_options import HttpOptions
from neso.frontends.kserve.http_frontend import KServeHttp
from neso.server import backend
from neso.server.core import Core
from neso.server.options import ModelControlMode, ServerOptions


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        assert list(self.json) == ["error"]
        return str(self.json["error"])


class Client:
    """A simple HTTP client that runs in a thread."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def get(self, path: str) -> Reply:
        return await self.request("GET", path)

    async def post(self, path: str, body: Any = b"", **headers: str) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, data, {k.replace("_", "-"): v for k, v in headers.items()})

    async def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        def exchange() -> Reply:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
            try:
                connection.request(method, path, body, headers or {})
                response = connection.getresponse()
                data = response.read()
                return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, data)
            finally:
                connection.close()

        return await asyncio.to_thread(exchange)


@pytest.fixture
def connect() -> type[Client]:
    """`connect(port)` returns a client of a frontend started by the test."""
    return Client


def write_repository(directory: Path, configs: dict[str, str]) -> None:
    for name, config in configs.items():
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "config.pbtxt").write_text(config)


@pytest.fixture
async def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Core]:
    for name, target in BACKENDS.items():
        monkeypatch.setitem(backend.BUILTIN, name, target)
    Wait.waiting.clear()
    Wait.cancelled.clear()
    write_repository(tmp_path, CONFIGS)
    (tmp_path / "text" / "2").mkdir()
    core = Core(
        ServerOptions(
            model_repository=(tmp_path,),
            model_control_mode=ModelControlMode.EXPLICIT,
            startup_models=("*",),
            exit_timeout=1.0,
        )
    )
    await core.start()
    yield core
    for stream in Wait.waiting:
        stream.finish()
    await core.stop()


@pytest.fixture
async def front(core: Core) -> AsyncIterator[KServeHttp]:
    front = KServeHttp(core, HttpOptions("127.0.0.1", 0, max_input_size=1 << 20))
    await front.start()
    yield front
    await front.stop(1.0)


@pytest.fixture
def client(front: KServeHttp) -> Client:
    return Client(front.port)
