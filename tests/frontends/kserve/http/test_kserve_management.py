"""Health, metadata, statistics, model repository, mounted applications and unknown paths."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http as triton
from fastapi import FastAPI

from neso.frontends.frontend_options import HttpOptions
from neso.frontends.kserve.http_frontend import KServeHttp
from neso.frontends.transport.http1 import AsgiApp

sys.path.insert(0, str(Path(__file__).parents[3] / "server"))

from repository_builder import RepositoryBuilder

from neso.server.core import Core
from neso.server.options import ModelControlMode, ServerOptions


async def test_health(client, core) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/text/ready"):
        reply = await client.get(path)
        assert (reply.status, reply.body) == (200, b"")
    reply = await client.get("/v2/models/nobody/ready")
    assert reply.status == 400 and "not ready" in reply.error
    await core.unload_model("text")
    assert (await client.get("/v2/models/text/ready")).status == 400


async def test_health_while_stopping(client, core) -> None:
    await core.stop()
    assert (await client.get("/v2/health/live")).status == 400
    assert (await client.get("/v2/health/ready")).status == 400


async def test_metadata(client) -> None:
    server = (await client.get("/v2")).json
    assert server["name"] == "neso" and "binary_tensor_data" in server["extensions"]
    assert "generate" not in server["extensions"]
    assert {"trace", "logging"} <= set(server["extensions"])
    assert (await client.get("/v2/models/batched")).json == {
        "name": "batched",
        "versions": ["1"],
        "platform": "test_identity",
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 2, -1]}],
        "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [-1, 2, -1]}],
    }
    config = (await client.get("/v2/models/batched/versions/1/config")).json
    assert config["max_batch_size"] == 8 and config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["input"][0]["dims"] == [2, -1]


async def test_statistics(client) -> None:
    await client.post("/v2/models/text/generate", {"PROMPT": "a"})
    for path in ("/v2/models/text/stats", "/v2/models/text/versions/2/stats"):
        (stats,) = (await client.get(path)).json["model_stats"]
        assert stats["name"] == "text" and stats["version"] == "2"
        assert stats["inference_stats"]["success"]["count"] == 1
    everything = (await client.get("/v2/models/stats")).json["model_stats"]
    assert {"text", "wait"} <= {stats["name"] for stats in everything}


async def test_repository(client) -> None:
    rows = (await client.post("/v2/repository/index")).json
    assert {"name": "text", "version": "2", "state": "READY"} in rows
    assert (await client.post("/v2/repository/models/text/unload")).body == b""
    rows = (await client.post("/v2/repository/index", {"ready": True})).json
    assert "text" not in {row["name"] for row in rows}
    rows = (await client.post("/v2/repository/index", {"ready": False})).json
    assert any(row["name"] == "text" and row.get("state") == "UNAVAILABLE" for row in rows)
    reply = await client.post("/v2/repository/models/text/load", {"parameters": {}})
    assert (reply.status, reply.body) == (200, b"")
    assert (await client.get("/v2/models/text/ready")).status == 200


async def test_load_with_config_and_file_overrides(client) -> None:
    config = {
        "backend": "test_identity",
        "input": [{"name": "IN", "data_type": "TYPE_INT8", "dims": [1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_INT8", "dims": [1]}],
    }
    parameters = {"config": json.dumps(config), "file:3/data": base64.b64encode(b"x").decode()}
    reply = await client.post("/v2/repository/models/fresh/load", {"parameters": parameters})
    assert reply.status == 200, reply.body
    assert (await client.get("/v2/models/fresh")).json["versions"] == ["3"]
    assert (await client.post("/v2/models/fresh/generate", {"IN": 5})).json["OUT"] == 5


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("models/text/load", b"{", "failed to parse"),
        ("models/text/load", {"parameters": 1}, "Unable to parse 'parameters'"),
        ("models/text/load", {"parameters": {"config": {}}}, "non-string as string"),
        ("models/text/load", {"parameters": {"file:1/x": "§"}}, "base64"),
        ("models/text/load", {"parameters": {"what": "x"}}, "unrecognized load parameter 'what'"),
        ("models/text/unload", {"parameters": {"unload_dependents": 1}}, "non-boolean as boolean"),
        ("index", {"ready": 1}, "Invalid value for 'ready': expected a boolean"),
    ],
)
async def test_invalid_repository_requests(client, path, body, message) -> None:
    reply = await client.post(f"/v2/repository/{path}", body)
    assert reply.status == 400 and message in reply.error, reply.body


async def test_repository_names_are_not_supported(client) -> None:
    for path in ("index", "models/text/load", "models/text/unload"):
        reply = await client.post(f"/v2/repository/here/{path}")
        assert (reply.status, reply.error) == (501, "'repository_name' specification is not supported")


async def test_unknown_paths(client) -> None:
    for path in ("/", "/v1", "/v2/", "/v2/models", "/v2/models/text/versions/1x"):
        assert (await client.get(path)).error == "Not Found"
    assert (await client.post("/v2/health/live")).error == "Method Not Allowed"


async def test_tritonclient(client) -> None:
    def exchange() -> dict[str, Any]:
        with triton.InferenceServerClient(f"127.0.0.1:{client.port}") as server:
            assert server.is_server_live() and server.is_server_ready() and server.is_model_ready("text")
            assert not server.is_model_ready("nobody")
            server.unload_model("text")
            server.load_model("text")
            with pytest.raises(triton.InferenceServerException, match="nobody"):
                server.get_model_metadata("nobody")
            return {
                "metadata": server.get_server_metadata(),
                "model": server.get_model_metadata("text"),
                "config": server.get_model_config("text"),
                "index": server.get_model_repository_index(),
                "stats": server.get_inference_statistics(),
            }

    found = await asyncio.to_thread(exchange)
    assert found["model"]["name"] == found["config"]["name"] == "text"
    assert len(found["index"]) > 3 and found["stats"]["model_stats"]


async def test_mounted_application(core, client) -> None:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> list[str]:
        return [model.name for model in core.models()]

    front = KServeHttp(core, HttpOptions("127.0.0.1", 0))
    front.mount("/v1", AsgiApp(app))
    await front.start()
    try:
        other = type(client)(front.port)
        assert "text" in (await other.get("/v1/models")).json
        assert (await other.get("/v1/nothing")).json == {"detail": "Not Found"}
        assert (await other.get("/v2/nothing")).error == "Not Found"
    finally:
        await front.stop()


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


async def test_control_refuses_pages_of_other_sites(client) -> None:
    for path in ("/v2/repository/models/text/unload", "/v2/repository/models/text/load", "/v2/logging"):
        for headers in ({"origin": "https://evil.example"}, {"sec_fetch_site": "cross-site"}):
            reply = await client.post(path, {}, **headers)
            assert (reply.status, "another origin" in reply.error) == (403, True)
    assert (await client.get("/v2/models/text/ready")).status == 200
    origin = f"http://127.0.0.1:{client.port}"
    assert (await client.post("/v2/repository/index", {}, origin=origin)).status == 200
