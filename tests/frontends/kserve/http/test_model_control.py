"""Model control modes and namespaces over HTTP."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "server"))

from repository_builder import RepositoryBuilder

from neso.frontends.frontend_options import HttpOptions
from neso.frontends.kserve.http_frontend import KServeHttp
from neso.server.core import Core
from neso.server.options import ModelControlMode, ServerOptions

REQUEST = {"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [0]}]}


@pytest.fixture
async def serve(connect: Any) -> AsyncIterator[Any]:
    """`await serve(repository, …, mode=…, option=…)` returns a core and its client."""
    running: list[tuple[KServeHttp, Core]] = []

    async def start(*repositories: RepositoryBuilder, mode: str, **options: Any) -> tuple[Core, Any]:
        paths = tuple(repository.path for repository in repositories)
        core = Core(ServerOptions(paths, model_control_mode=ModelControlMode(mode), **options))
        await core.start()
        front = KServeHttp(core, HttpOptions("127.0.0.1", 0))
        await front.start()
        running.append((front, core))
        return core, connect(front.port)

    yield start
    for front, core in running:
        await front.stop(1.0)
        await core.stop()


@pytest.mark.parametrize("mode", ["none", "poll"])
async def test_load_requests_are_rejected(serve, tmp_path: Path, mode: str) -> None:
    repository = RepositoryBuilder(tmp_path / "models")
    repository.add("m")
    _, client = await serve(repository, mode=mode)
    for action in ("load", "unload"):
        reply = await client.post(f"/v2/repository/models/m/{action}", {})
        assert reply.status == 503
        assert reply.json == {"error": "explicit model load / unload is not allowed if polling is enabled"}


async def test_polling_updates_the_index(serve, tmp_path: Path) -> None:
    repository = RepositoryBuilder(tmp_path / "models")
    core, client = await serve(repository, mode="poll", repository_poll_secs=0)
    assert (await client.post("/v2/repository/index", {})).json == []
    repository.add_constant("m", 1)
    repository.add("broken", config="fooo: 1")
    assert {"name": "m"} in (await client.post("/v2/repository/index", {})).json
    await core.poll_repositories()
    broken, good = (await client.post("/v2/repository/index", {})).json
    assert good == {"name": "m", "version": "1", "state": "READY"}
    assert broken["state"] == "UNAVAILABLE" and "failed to read text proto" in broken["reason"]
    assert (await client.post("/v2/repository/index", {"ready": True})).json == [good]
    assert (await client.post("/v2/models/m/infer", REQUEST)).json["outputs"][0]["data"] == [1.0]


async def test_same_name_in_two_namespaces(serve, tmp_path: Path) -> None:
    one, two = RepositoryBuilder(tmp_path / "one"), RepositoryBuilder(tmp_path / "two")
    one.add_constant("m", 1)
    two.add_constant("m", 2)
    one.add_ensemble("first", "m")
    _, client = await serve(one, two, mode="none", model_namespacing=True)
    reply = await client.post("/v2/models/m/infer", REQUEST)
    assert reply.status == 400 and "namespace must be provided to resolve ambiguity" in reply.json["error"]
    assert (await client.get("/v2/models/m/ready")).status == 400
    assert (await client.post("/v2/models/first/infer", REQUEST)).json["outputs"][0]["data"] == [1.0]
    assert (await client.get("/v2/health/ready")).status == 200
    assert len((await client.get("/v2/models/stats")).json["model_stats"]) == 3
