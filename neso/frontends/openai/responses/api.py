"""The routes of the Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from neso.frontends.openai.access.api_keys import request_key
from neso.frontends.openai.chat.chat_completions import chat_sampling, explain
from neso.frontends.openai.chat.image_fetcher import Media
from neso.frontends.openai.chat.message_format import MessageFormats
from neso.frontends.openai.chat.prompt import ToolUse, chat_prompt
from neso.frontends.openai.choices import EventStream, generation_request
from neso.frontends.openai.errors import ApiError, invalid, to_api_error
from neso.frontends.openai.model_resolver import Target, Targets
from neso.frontends.openai.request_params import refuse_what_cannot_be_honoured
from neso.frontends.openai.responses.chat_conversion import (
    Item,
    chat_request,
    input_items,
    renamed_here,
    truncated_prompt,
)
from neso.frontends.openai.responses.output_items import json_text
from neso.frontends.openai.responses.run import Response, ResponseRun, written_events
from neso.frontends.openai.responses.schemas import ResponseRequest
from neso.frontends.openai.responses.store import EventLog, ResponseStore, StoredResponse
from neso.frontends.openai.routing import GenerationEndpoint, error_response, while_connected
from neso.frontends.openai.schemas import ChatCompletionRequest
from neso.frontends.openai_options import OpenAIOptions
from neso.generation import InvalidParameter, encode_text

if TYPE_CHECKING:
    from neso.server.core import Core
    from neso.server.tracing import Trace


def item_page(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of `items`: `limit` of them (1 to 100), newest first unless `order` is asc, those behind `after`.

    Raises `ApiError`.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", f"'order' must be 'asc' or 'desc', got {order!r}.")
    limit = query.get("limit", "20")
    if not (limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= 100):
        raise invalid("limit", f"'limit' must be an integer from 1 to 100, got {limit!r}.")
    ordered = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    start = 0
    if after is not None:
        start = next((i + 1 for i, item in enumerate(ordered) if item["id"] == after), -1)
        if start < 0:
            raise invalid("after", f"'after' is the id of no item: {after!r}.")
    page = ordered[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(ordered),
    }


OWNER: ContextVar[str] = ContextVar("owner", default="")
"""Whose API key the current request came with."""
MAX_BACKGROUND = 256
"""Most responses that are being made in the background."""


class ResponsesApi:
    """Makes responses, and keeps them: in the memory of this process, for as long as there is room."""

    def __init__(self, targets: Targets, media: Media, options: OpenAIOptions) -> None:
        self._targets = targets
        self._media = media
        self._formats = MessageFormats(options)
        self._store = ResponseStore(options.max_stored_responses, options.max_stored_response_bytes)

    async def create(self, request: ResponseRequest, trace: Trace | None = None) -> Any:
        """The HTTP response, an ASGI application. Raises `ApiError` and what the core raises."""
        context = self._context(request)
        chat = chat_request(request, context)
        try:
            run = await self._prepare(request, chat, trace)
            stored = StoredResponse(run.response, context, OWNER.get())
            if request.background:
                return self._in_background(request, run, stored)
            if request.stream:
                return await EventStream.open(self._streamed(request, run, stored))
            return await self._whole(request, run, stored)
        except ApiError as error:
            raise renamed_here(error) from None

    async def count_input(self, request: ResponseRequest, trace: Trace | None = None) -> HttpResponse:
        """How many tokens the request's prompt has. Raises as `create`."""
        chat = chat_request(request, self._context(request))
        target = await self._targets.find(request.model)
        try:
            prompt, _ = await self._prompt(request, chat, ToolUse.of_chat(chat), target)
        except InvalidParameter as error:
            raise renamed_here(explain(error, chat)) from None
        tokens = await encode_text(target.text, prompt, add_special_tokens=bool(chat.add_special_tokens))
        return _json({"object": "response.input_tokens", "input_tokens": len(tokens)})

    def retrieve(self, response_id: str, query: Mapping[str, str]) -> Any:
        """The response as it is now; with `stream`, the events of one made in the background. Raises `ApiError`."""
        stored = self._find(response_id)
        if query.get("stream", "false").lower() not in ("true", "1"):
            return _json(stored.response.as_dict())
        after = query.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 9:
            raise invalid("starting_after", f"'starting_after' must be an integer, got {after!r}.")
        if stored.log is None:
            raise invalid(
                "stream", "Only a response made with 'background' and 'stream' can be streamed again."
            )
        return EventStream.of(stored.log.follow(max(int(after) + 1, 0)))

    async def delete(self, response_id: str) -> HttpResponse:
        """Forget a response; one that is being made ends. Raises `ApiError`."""
        stored = self._find(response_id)
        await self._stop(stored)
        self._store.remove(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str) -> HttpResponse:
        """End a response that is made in the background. Raises `ApiError`."""
        stored = self._find(response_id)
        if stored.task is None:
            raise ApiError(400, "Only a response made with 'background' can be cancelled.")
        await self._stop(stored)
        return _json(stored.response.as_dict())

    def input_items(self, response_id: str, query: Mapping[str, str]) -> HttpResponse:
        """What the model was given: those of the responses that this one continues, and its own. Raises `ApiError`."""
        return _json(item_page(self._find(response_id).context, query))

    async def close(self) -> None:
        """End what is being made in the background."""
        for stored in self._store.unfinished():
            await self._stop(stored)

    def _find(self, response_id: str) -> StoredResponse:
        stored = self._store.get(response_id, OWNER.get())
        if stored is None:
            raise ApiError(404, f"There is no response with id '{response_id}'.", param="response_id")
        return stored

    def _context(self, request: ResponseRequest) -> list[Item]:
        """The items that the model is given: those of the previous response, and the request's."""
        own = input_items(request)
        name = request.previous_response_id
        if name is None:
            return own
        previous = self._store.get(name, OWNER.get())
        if previous is None:
            raise invalid(
                "previous_response_id",
                f"Previous response with id '{name}' not found.",
                "previous_response_not_found",
            )
        if not previous.response.has_ended:
            raise invalid("previous_response_id", f"Response '{name}' is still being made.")
        return [*previous.context, *previous.response.items, *own]

    async def _prepare(
        self, request: ResponseRequest, chat: ChatCompletionRequest, trace: Trace | None
    ) -> ResponseRun:
        refuse_what_cannot_be_honoured(chat)
        if request.background and not (request.is_stored and self._store.keeps_any):
            raise invalid("background", "'background' needs a store: nobody could fetch the response.")
        target = await self._targets.find(request.model)
        tool_use = ToolUse.of_chat(chat)
        try:
            prompt, images = await self._prompt(request, chat, tool_use, target)
        except InvalidParameter as error:
            raise explain(error, chat) from None
        message_format = self._formats.of(chat, tool_use, target, prompt)
        sampling = chat_sampling(chat, target.language_model.default_sampling, message_format)
        response = Response(request, sampling)
        generation = generation_request(
            chat,
            target,
            prompt,
            sampling,
            response.id,
            add_special_tokens=False,
            images=await self._media.fetched(images),
        )
        return ResponseRun(
            response,
            target,
            generation,
            message_format.reader(eager=bool(request.stream)),
            explain=lambda error: renamed_here(explain(error, chat)),
            trace=None if request.background else trace,  # which ends with the HTTP response
        )

    @staticmethod
    async def _prompt(
        request: ResponseRequest, chat: ChatCompletionRequest, tool_use: ToolUse, target: Target
    ) -> tuple[str, tuple[Any, ...]]:
        if request.truncation == "auto":
            # Which tokenizes the conversation several times over.
            return await asyncio.to_thread(truncated_prompt, chat, tool_use, target)
        return chat_prompt(chat, tool_use, target.text)

    async def _whole(
        self, request: ResponseRequest, run: ResponseRun, stored: StoredResponse
    ) -> HttpResponse:
        async with aclosing(run.events()) as steps:
            async for _ in steps:
                pass
        self._keep(request, stored)
        return _json(run.response.as_dict())

    async def _streamed(
        self, request: ResponseRequest, run: ResponseRun, stored: StoredResponse
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(written_events(run)) as steps:
            async for events in steps:
                if run.response.has_ended:
                    self._keep(request, stored)  # before the client knows that it can be asked for
                yield b"".join(events)

    def _keep(self, request: ResponseRequest, stored: StoredResponse) -> None:
        if request.is_stored:
            self._store.put(stored)

    def _in_background(self, request: ResponseRequest, run: ResponseRun, stored: StoredResponse) -> Any:
        if len(self._store.unfinished()) >= MAX_BACKGROUND:
            raise ApiError(429, f"{MAX_BACKGROUND} responses are being made in the background already.")
        if request.stream:
            stored.log = EventLog()
        stored.task = asyncio.create_task(self._make(run, stored))
        self._store.put(stored)
        if stored.log is not None:
            return EventStream.of(stored.log.follow(0))
        return _json(run.response.as_dict())

    async def _make(self, run: ResponseRun, stored: StoredResponse) -> None:
        """Make a response in the background, to its end in whatever way."""
        try:
            async with aclosing(written_events(run)) as steps:
                async for events in steps:
                    if stored.log is not None:
                        stored.log.add(*events)
        finally:
            if not run.response.has_ended:
                run.response.cancel()
            if stored.log is not None:
                stored.log.end()
            if run.response.id in self._store:  # and has not been deleted
                self._store.put(stored)

    @staticmethod
    async def _stop(stored: StoredResponse) -> None:
        task = stored.task
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if not stored.response.has_ended:
            stored.response.cancel()  # before its task had begun
        if stored.log is not None:
            stored.log.end()


def _json(body: dict[str, Any]) -> HttpResponse:
    return HttpResponse(json_text(body), media_type="application/json")


def response_routes(core: Core, api: ResponsesApi, max_body_size: int) -> list[Route]:
    """All of them."""

    async def retrieve(request: Request) -> Any:
        return api.retrieve(request.path_params["response_id"], request.query_params)

    async def delete(request: Request) -> Any:
        return await api.delete(request.path_params["response_id"])

    async def cancel(request: Request) -> Any:
        return await api.cancel(request.path_params["response_id"])

    async def input_items(request: Request) -> Any:
        return api.input_items(request.path_params["response_id"], request.query_params)

    def route(path: str, endpoint: ASGIApp, method: str) -> Route:
        return Route(path, _Owned(endpoint), methods=[method])

    create = GenerationEndpoint(core, ResponseRequest, api.create, max_body_size)
    count = GenerationEndpoint(core, ResponseRequest, api.count_input, max_body_size)
    one = "/v1/responses/{response_id}"
    return [
        route("/v1/responses", create, "POST"),
        route("/v1/responses/input_tokens", count, "POST"),
        route(one, _Endpoint(retrieve), "GET"),
        route(one, _Endpoint(delete), "DELETE"),
        route(one + "/cancel", _Endpoint(cancel), "POST"),
        route(one + "/input_items", _Endpoint(input_items), "GET"),
    ]


class _Owned:
    """An ASGI endpoint that knows whose request it serves."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = request_key(scope)
        token = OWNER.set("" if key is None else key.owner)
        try:
            await self._app(scope, receive, send)
        finally:
            OWNER.reset(token)


class _Endpoint:
    """An ASGI endpoint without a body; what it answers may be a stream."""

    def __init__(self, handle: Callable[[Request], Awaitable[Any]]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._handle(Request(scope, receive))
        except Exception as error:
            response = error_response(to_api_error(error))
        await while_connected(receive, response(scope, receive, send))
