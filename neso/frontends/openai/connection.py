"""The client's side of a request: its body, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

from neso.frontends.openai.errors import ApiError, validation_error

Body = TypeVar("Body", bound=BaseModel)


class ClientGone(Exception):
    """The client hung up before its request was complete."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises `ApiError`: 413 for more than `limit` bytes, 415 if compressed; and `ClientGone`."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise ApiError(
                415,
                f"Bodies in the encoding '{value.decode('latin-1')}' are not read: send them as they are.",
                code="unsupported_content_encoding",
            )
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def parse_body(body: bytes, schema: type[Body]) -> Body:
    """The body as a `schema`. Raises `ApiError` 400 that names the field at fault."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise validation_error(error) from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, but cancel it when the client goes away or this task is cancelled.

    Returns after the work's clean-up has run, so whatever it had asked of an engine is aborted by then. Servers
    differ in whether they cancel the task of a client that hung up; all of them deliver `http.disconnect`.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes, the limit that --http-max-input-size sets.",
        code="content_too_large",
    )
