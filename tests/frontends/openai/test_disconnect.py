"""A disconnect of the client aborts its generations."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from asgi_client import AsgiClient, make_scope
from eventually import until
from scripted_model import ScriptedModel
from starlette.applications import Starlette

from neso.frontends.openai.routing import while_connected

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "scripted", "prompt": "a"}),
    ("/v1/completions", {"model": "scripted", "prompt": ["a", "b"], "n": 2}),
    ("/v1/chat/completions", {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}),
]


@pytest.fixture
def script() -> ScriptedModel:
    script = ScriptedModel()
    script.hold = True
    return script


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_disconnect_while_waiting(
    client: AsgiClient, script: ScriptedModel, path: str, body: dict[str, Any]
) -> None:
    response = await asyncio.wait_for(client.post(path, body, disconnect_after=0), 60)
    assert response.status == 0
    assert len(script.aborted) == len(script.requests)


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_disconnect_during_a_stream(
    client: AsgiClient, script: ScriptedModel, path: str, body: dict[str, Any]
) -> None:
    response = await asyncio.wait_for(client.post(path, {**body, "stream": True}, disconnect_after=1), 60)
    assert not response.complete
    assert script.requests
    assert sorted(script.aborted) == sorted(request.request_id for request in script.requests)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_cancelled_task_aborts_generation(
    client: AsgiClient, script: ScriptedModel, path: str, body: dict[str, Any], stream: bool
) -> None:
    task = asyncio.create_task(client.post(path, {**body, "stream": stream}))
    await until(lambda: script.requests)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(script.aborted) == sorted(request.request_id for request in script.requests)


async def test_disconnect_in_the_request_body(app: Starlette, script: ScriptedModel) -> None:
    messages = [
        {"type": "http.request", "body": b'{"model":', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await app(make_scope("POST", "/v1/completions"), receive, send)
    assert not sent
    assert not script.requests


async def test_disconnect_of_a_slow_reader(app: Starlette, script: ScriptedModel) -> None:
    """The response is blocked in `send`, not waiting for the next token."""
    script.hold = True
    body = [b'{"model": "scripted", "prompt": "a", "stream": true}']
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 2:
            await asyncio.Event().wait()

    await asyncio.wait_for(app(make_scope("POST", "/v1/completions"), receive, send), 60)
    assert len(sent) == 2
    assert len(script.aborted) == 1


async def test_one_task_under_a_server_that_cancels_on_disconnect(
    app: Starlette, script: ScriptedModel
) -> None:
    """Servers with the ASGI extension cancel the task themselves, so no second task watches for the disconnect."""
    body = [b'{"model": "scripted", "prompt": "a"}']

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body.pop(), "more_body": False}

    async def send(message: Any) -> None:
        raise AssertionError("the model never answers")

    before = asyncio.all_tasks()
    scope = {**make_scope("POST", "/v1/completions"), "extensions": {"neso.cancels_on_disconnect": {}}}
    task = asyncio.create_task(app(scope, receive, send))
    await until(lambda: script.requests)
    assert len(asyncio.all_tasks() - before) <= 2, "the request's task, and the model's"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(script.aborted) == 1


async def test_errors_after_a_disconnect_are_retrieved(caplog: pytest.LogCaptureFixture) -> None:
    """Other ASGI servers raise from `receive`, and cancel the application's task themselves."""

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("the cleanup failed")

    async def failing_receive() -> Any:
        await asyncio.sleep(0.01)
        raise OSError("the connection is lost")

    async def silent_receive() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(OSError, match="cleanup"):
        await while_connected(failing_receive, work())
    task = asyncio.create_task(while_connected(silent_receive, work()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises((asyncio.CancelledError, OSError)):
        await task
    del task
    gc.collect()
    await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text
