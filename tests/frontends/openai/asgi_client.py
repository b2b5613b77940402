"""Calls an ASGI application in the same process, message by message."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import orjson


@dataclass
class AsgiResponse:
    """The application's response."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> Any:
        return orjson.loads(self.body)

    def events(self) -> list[Any]:
        """The data of the events, decoded except `[DONE]`."""
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") for block in blocks)
        data = [block.removeprefix("data: ") for block in blocks]
        return [text if text == "[DONE]" else orjson.loads(text) for text in data]


class AsgiClient:
    """Sends requests to `app`. The client disconnects after `disconnect_after` body parts."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def get(self, path: str) -> AsgiResponse:
        return await self.request("GET", path, b"")

    async def post(self, path: str, body: Any, **options: Any) -> AsgiResponse:
        return await self.request("POST", path, json.dumps(body).encode(), **options)

    async def request(
        self,
        method: str,
        path: str,
        *body: bytes,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        disconnect_after: int | None = None,
    ) -> AsgiResponse:
        response = AsgiResponse()
        pending = list(body)
        disconnected = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if pending:
                part = pending.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(pending)}
            if disconnect_after == 0:
                return {"type": "http.disconnect"}
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = {k.decode(): v.decode() for k, v in message["headers"]}
                return
            if message["body"]:
                response.parts.append(message["body"])
            response.complete = not message.get("more_body", False)
            if disconnect_after is not None and len(response.parts) >= disconnect_after:
                disconnected.set()

        await self._app(make_scope(method, path, headers), receive, send)
        return response


def make_scope(method: str, path: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> dict[str, Any]:
    """The ASGI scope of a request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
