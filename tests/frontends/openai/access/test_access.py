"""Access control of the OpenAI API."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest
from asgi_client import AsgiClient, AsgiResponse

from neso.frontends.openai import OpenAIOptions, create_app
from neso.frontends.openai.access import AccessOptions, ApiKeys, Quota
from neso.frontends.openai.access.rate_limits import format_duration
from neso.server.core import Core

BODY = {"model": "scripted", "prompt": "the quick", "max_tokens": 3}


@pytest.fixture(autouse=True)
def fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the clock: rate limit windows start at full minutes, and a test must not span two."""
    monkeypatch.setattr(time, "time", lambda: 1_800_000_030.0)


def client_of(core: Core, **access: Any) -> AsgiClient:
    return AsgiClient(create_app(core, OpenAIOptions(access=AccessOptions(**access))))


async def send_request(client: AsgiClient, key: str = "", **headers: str) -> AsgiResponse:
    if key:
        headers["authorization"] = f"Bearer {key}"
    pairs = tuple((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items())
    return await client.post("/v1/completions", BODY, headers=pairs)


async def test_open_by_default(core: Core) -> None:
    client = client_of(core)
    response = await send_request(client)
    assert response.status == 200
    assert not any(name.startswith(("x-ratelimit", "access-control")) for name in response.headers)


async def test_api_key_is_required(core: Core) -> None:
    client = client_of(core, keys=ApiKeys(["right", "other"]))
    assert (await send_request(client, "right")).status == 200
    assert (await send_request(client, x_api_key="other")).status == 200
    assert (await send_request(client, authorization="bearer right")).status == 200
    for response in (
        await send_request(client),
        await send_request(client, "wrong"),
        await send_request(client, x_api_key="wrong"),
        await send_request(client, authorization="Basic right"),
        await send_request(client, "wrong", x_api_key="right"),
    ):
        error = response.json()["error"]
        assert response.status == 401
        assert (error["type"], error["param"], error["code"]) == (
            "invalid_request_error",
            None,
            "invalid_api_key",
        )
        assert "wrong" not in error["message"]
        assert response.headers["www-authenticate"] == "Bearer"


async def test_open_groups_need_no_key(core: Core) -> None:
    paths = (
        "/health/ready",
        "/health",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/v1/models",
        "/nowhere",
        "/healthy",
    )

    async def open_paths(*groups: str) -> list[str]:
        client = client_of(core, keys=ApiKeys(["right"]), open_groups=groups)
        return [path for path in paths if (await client.get(path)).status == 200]

    assert await open_paths("health") == ["/health/ready", "/health"]
    assert await open_paths("metrics", "docs") == ["/metrics", "/docs", "/openapi.json"]
    assert await open_paths() == []


async def test_requests_per_minute(core: Core) -> None:
    client = client_of(core, keys=ApiKeys(["a", "b"]), quota=Quota(requests=2))
    first, second, third = [await send_request(client, "a") for _ in range(3)]
    assert [first.status, second.status, third.status] == [200, 200, 429]
    assert [response.headers["x-ratelimit-remaining-requests"] for response in (first, second, third)] == [
        "1",
        "0",
        "0",
    ]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    assert third.json()["error"]["type"] == "requests"
    assert 1 <= int(third.headers["retry-after"]) <= 60
    assert (await send_request(client, "b")).status == 200  # another key has a separate limit
    assert (await client.get("/v1/models")).status == 401
    assert "x-ratelimit-limit-requests" not in (await client.get("/health")).headers


async def test_tokens_per_minute(core: Core) -> None:
    client = client_of(core, quota=Quota(tokens=20))
    first = await send_request(client)
    used = first.json()["usage"]["total_tokens"]
    assert first.headers["x-ratelimit-remaining-tokens"] == "20"
    await asyncio.sleep(0)
    second = await send_request(client)
    assert second.headers["x-ratelimit-remaining-tokens"] == str(20 - used)
    answers = [await send_request(client) for _ in range(6)]
    assert answers[-1].status == 429
    assert answers[-1].json()["error"]["type"] == "tokens"
    assert "TPM" in answers[-1].json()["error"]["message"]


async def test_streams_and_disconnected_clients_count(core: Core) -> None:
    client = client_of(core, quota=Quota(tokens=1000))

    async def remaining() -> int:
        await asyncio.sleep(0.01)
        return int((await client.post("/v1/completions", {})).headers["x-ratelimit-remaining-tokens"])

    await client.post("/v1/completions", {**BODY, "stream": True})
    after_stream = await remaining()
    assert after_stream < 1000
    await client.post("/v1/completions", {**BODY, "stream": True}, disconnect_after=1)
    assert await remaining() < after_stream


async def test_quota_of_a_key(core: Core, tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("few:sk-few rpm=1\nmany:sk-many\n")
    client = client_of(core, keys=ApiKeys(file=file))
    assert [(await send_request(client, "sk-few")).status for _ in range(2)] == [200, 429]
    assert [(await send_request(client, "sk-many")).status for _ in range(3)] == [200] * 3


def test_format_duration() -> None:
    assert [format_duration(s) for s in (0, 0.25, 1, 59.5, 60, 360)] == [
        "0ms",
        "250ms",
        "1s",
        "1m0s",
        "1m0s",
        "6m0s",
    ]


async def test_cors(core: Core) -> None:
    client = client_of(core, keys=ApiKeys(["right"]), origins=("https://chat.example",))
    requested = ((b"origin", b"https://chat.example"), (b"access-control-request-method", b"POST"))
    preflight = await client.request(
        "OPTIONS",
        "/v1/completions",
        headers=(*requested, (b"access-control-request-headers", b"authorization")),
    )
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    response = await send_request(client, origin="https://chat.example")
    assert response.status == 401  # the web page can read the error
    assert response.headers["access-control-allow-origin"] == "https://chat.example"
    assert "x-request-id" in response.headers["access-control-expose-headers"]
    other = await send_request(client, "right", origin="https://evil.example")
    assert "access-control-allow-origin" not in other.headers


async def test_request_ids(core: Core, caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(core, keys=ApiKeys(["right"]))
    assert (await send_request(client, "right", x_request_id="mine-1")).headers["x-request-id"] == "mine-1"
    made = [(await send_request(client, "right")).headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    assert all(name.startswith("req_") for name in made)
    assert (await send_request(client, x_request_id="mine-2")).headers["x-request-id"] == "mine-2"
    assert (
        (await send_request(client, "right", x_request_id="two words"))
        .headers["x-request-id"]
        .startswith("req_")
    )
    with caplog.at_level(logging.DEBUG, "neso"):
        await send_request(client, "right", x_request_id="mine-3")
    (record,) = [record for record in caplog.records if "mine-3" in record.getMessage()]
    assert "POST /v1/completions: 200" in record.getMessage()
    assert "key 'key-1'" in record.getMessage()
    assert record.request_id == "mine-3"
    assert "right" not in caplog.text
