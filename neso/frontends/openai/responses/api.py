"""`/v1/responses`: create, retrieve, cancel and delete responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response as HttpResponse

from neso.frontends.openai.chat.chat_completions import (
    chat_client_error,
    chat_sampling,
    reject_unsupported_chat,
)
from neso.frontends.openai.chat.image_fetcher import ImageFetcher
from neso.frontends.openai.chat.message_format import MessageFormats
from neso.frontends.openai.chat.prompt import ToolUse, render_chat
from neso.frontends.openai.chat.schemas import ChatCompletionRequest
from neso.frontends.openai.errors import ApiError, invalid
from neso.frontends.openai.model_resolver import ModelResolver, ResolvedModel
from neso.frontends.openai.request_params import generation_request, reject_unsupported
from neso.frontends.openai.responses.chat_conversion import (
    Item,
    chat_request,
    input_items,
    to_responses_error,
    truncated_prompt,
)
from neso.frontends.openai.responses.output_items import dump_json
from neso.frontends.openai.responses.run import Response, ResponseRun
from neso.frontends.openai.responses.schemas import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseEvent,
    ResponseObject,
    ResponseRequest,
)
from neso.frontends.openai.responses.store import EventLog, ResponseStore, StoredResponse
from neso.frontends.openai.routing import Parameter, RequestContext, operation
from neso.frontends.openai.sse import EventStream
from neso.frontends.openai_options import OpenAIOptions
from neso.generation import InvalidParameter, encode_text

MAX_BACKGROUND = 256
"""Maximum number of responses in progress in the background."""

_TAG = "Responses"
_PATH = "/v1/responses/{response_id}"
_RESPONSE_ID = Parameter("response_id", "path", {"type": "string"})
_EXAMPLE = {"model": "neso-pilot", "input": "What is TTFT?"}


class ResponsesApi:
    """The Responses API. Responses are stored in the memory of this process."""

    def __init__(self, resolver: ModelResolver, images: ImageFetcher, options: OpenAIOptions) -> None:
        self._resolver = resolver
        self._images = images
        self._formats = MessageFormats(options)
        self._store = ResponseStore(options.max_stored_responses, options.max_stored_response_bytes)

    @operation(
        "POST",
        "/v1/responses",
        tag=_TAG,
        request=ResponseRequest,
        response=ResponseObject,
        events=ResponseEvent,
        examples={"text": {**_EXAMPLE, "max_output_tokens": 16}},
        cancellable=True,
    )
    async def create(self, request: ResponseRequest, context: RequestContext) -> Any:
        """Create a response."""
        items = self._conversation(request, context.owner)
        chat = chat_request(request, items)
        try:
            run = await self._prepare(request, chat, context)
            stored = StoredResponse(run.response, items, context.owner)
            if request.background:
                return self._start_background(request, run, stored)
            if request.stream:
                return await EventStream.open(self._stream(request, run, stored))
            async with aclosing(run.events()) as steps:
                async for _ in steps:
                    pass
            if request.is_stored:
                self._store.put(stored)
            return _json(run.response.as_dict())
        except ApiError as error:
            raise to_responses_error(error) from None

    @operation(
        "POST",
        "/v1/responses/input_tokens",
        tag=_TAG,
        request=ResponseRequest,
        response=InputTokens,
        examples={"text": _EXAMPLE},
        cancellable=True,
    )
    async def count_input_tokens(self, request: ResponseRequest, context: RequestContext) -> InputTokens:
        """Count the prompt tokens of a request."""
        chat = chat_request(request, self._conversation(request, context.owner))
        model = await self._resolver.find(request.model)
        prompt, _ = await self._prompt(request, chat, ToolUse.of_chat(chat), model)
        special = bool(chat.add_special_tokens)
        tokens = await encode_text(model.tokenizer, prompt, add_special_tokens=special)
        return {"object": "response.input_tokens", "input_tokens": len(tokens)}

    @operation(
        "GET",
        _PATH,
        tag=_TAG,
        response=ResponseObject,
        events=ResponseEvent,
        parameters=(
            _RESPONSE_ID,
            Parameter("stream", "query", {"type": "boolean"}, "Stream the events of a background response."),
            Parameter("starting_after", "query", {"type": "integer"}, "Skip events up to this number."),
        ),
        errors=(400, 404, 500),
        cancellable=True,
    )
    async def retrieve(self, context: RequestContext) -> Any:
        """Get a stored response, or the events of a background response."""
        stored = self._find(context)
        query = context.query
        if query.get("stream", "false").lower() not in ("true", "1"):
            return _json(stored.response.as_dict())
        after = query.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 9:
            raise invalid("starting_after", f"'starting_after' must be an integer, got {after!r}.")
        if stored.log is None:
            raise invalid(
                "stream", "Only a response made with 'background' and 'stream' can be streamed again."
            )
        return EventStream(stored.log.follow(max(int(after) + 1, 0)))

    @operation(
        "DELETE",
        _PATH,
        tag=_TAG,
        response=DeletedResponse,
        parameters=(_RESPONSE_ID,),
        errors=(404, 500),
    )
    async def delete(self, context: RequestContext) -> DeletedResponse:
        """Delete a response, and cancel it if it is in progress."""
        stored = self._find(context)
        await self._stop(stored)
        self._store.remove(stored.response.id)
        return {"id": stored.response.id, "object": "response", "deleted": True}

    @operation(
        "POST",
        f"{_PATH}/cancel",
        tag=_TAG,
        response=ResponseObject,
        parameters=(_RESPONSE_ID,),
        errors=(400, 404, 500),
    )
    async def cancel(self, context: RequestContext) -> HttpResponse:
        """Cancel a background response."""
        stored = self._find(context)
        if stored.task is None:
            raise ApiError(400, "Only a response made with 'background' can be cancelled.")
        await self._stop(stored)
        return _json(stored.response.as_dict())

    @operation(
        "GET",
        f"{_PATH}/input_items",
        tag=_TAG,
        response=ItemList,
        parameters=(
            _RESPONSE_ID,
            Parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
            Parameter("order", "query", {"enum": ["asc", "desc"], "default": "desc"}),
            Parameter("after", "query", {"type": "string"}, "Id of the item before the page."),
        ),
        errors=(400, 404, 500),
    )
    async def list_input_items(self, context: RequestContext) -> HttpResponse:
        """List the input items of a response, including those of the responses that it continues."""
        return _json(_item_page(self._find(context).context, context.query))

    async def close(self) -> None:
        """Cancel all background responses."""
        for stored in self._store.in_progress():
            await self._stop(stored)

    def _find(self, context: RequestContext) -> StoredResponse:
        response_id = context.path_params["response_id"]
        stored = self._store.get(response_id, context.owner)
        if stored is None:
            raise ApiError(404, f"There is no response with id '{response_id}'.", param="response_id")
        return stored

    def _conversation(self, request: ResponseRequest, owner: str) -> list[Item]:
        """Return the items of the previous response and of the request. Raises `ApiError`."""
        own = input_items(request)
        name = request.previous_response_id
        if name is None:
            return own
        previous = self._store.get(name, owner)
        if previous is None:
            raise invalid(
                "previous_response_id",
                f"Previous response with id '{name}' not found.",
                "previous_response_not_found",
            )
        if not previous.response.has_ended:
            raise invalid("previous_response_id", f"Response '{name}' is still being made.")
        return [*previous.context, *previous.response.output.as_list(), *own]

    async def _prepare(
        self, request: ResponseRequest, chat: ChatCompletionRequest, context: RequestContext
    ) -> ResponseRun:
        reject_unsupported(chat)
        reject_unsupported_chat(chat)
        if request.background and not (request.is_stored and self._store.is_enabled):
            raise invalid("background", "'background' requires 'store' and a server that stores responses.")
        model = await self._resolver.find(request.model)
        tool_use = ToolUse.of_chat(chat)
        prompt, images = await self._prompt(request, chat, tool_use, model)
        message_format = self._formats.of(chat, tool_use, model, prompt)
        sampling = chat_sampling(chat, model.language_model.default_sampling, message_format)
        response = Response(request, sampling)
        generation = generation_request(
            chat,
            prompt,
            sampling,
            response.id,
            lora_name=model.lora_name,
            add_special_tokens=False,
            images=await self._images.fetch(images),
        )
        return ResponseRun(
            response,
            model,
            generation,
            message_format.parser(eager=bool(request.stream)),
            to_client_error=lambda error: to_responses_error(chat_client_error(error, chat)),
            # A trace ends with its HTTP response, before a background response ends.
            trace=None if request.background else context.trace,
        )

    @staticmethod
    async def _prompt(
        request: ResponseRequest, chat: ChatCompletionRequest, tool_use: ToolUse, model: ResolvedModel
    ) -> tuple[str, tuple[Any, ...]]:
        """Return the prompt and its images. Raises `ApiError`."""
        try:
            if request.truncation == "auto":
                # In a thread: the conversation is tokenized several times.
                return await asyncio.to_thread(truncated_prompt, chat, tool_use, model)
            return await render_chat(chat, tool_use, model.tokenizer)
        except InvalidParameter as error:
            raise to_responses_error(chat_client_error(error, chat)) from None

    async def _stream(
        self, request: ResponseRequest, run: ResponseRun, stored: StoredResponse
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(run.encoded_events()) as steps:
            async for events in steps:
                if run.response.has_ended and request.is_stored:
                    self._store.put(stored)  # before the client receives the last event
                yield b"".join(events)

    def _start_background(self, request: ResponseRequest, run: ResponseRun, stored: StoredResponse) -> Any:
        if len(self._store.in_progress()) >= MAX_BACKGROUND:
            raise ApiError(429, f"{MAX_BACKGROUND} responses are being made in the background already.")
        if request.stream:
            stored.log = EventLog()
        stored.task = asyncio.create_task(self._run_background(run, stored))
        self._store.put(stored)
        if stored.log is not None:
            return EventStream(stored.log.follow(0))
        return _json(run.response.as_dict())

    async def _run_background(self, run: ResponseRun, stored: StoredResponse) -> None:
        try:
            async with aclosing(run.encoded_events()) as steps:
                async for events in steps:
                    if stored.log is not None:
                        stored.log.add(*events)
        finally:
            if not run.response.has_ended:
                run.response.cancel()
            if stored.log is not None:
                stored.log.end()
            if run.response.id in self._store:  # not deleted meanwhile
                self._store.put(stored)

    @staticmethod
    async def _stop(stored: StoredResponse) -> None:
        task = stored.task
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if not stored.response.has_ended:
            stored.response.cancel()  # the task was cancelled before it started
        if stored.log is not None:
            stored.log.end()


def _item_page(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of `items`, newest first unless `order` is asc. Raises `ApiError`."""
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


def _json(body: dict[str, Any]) -> HttpResponse:
    return HttpResponse(dump_json(body), media_type="application/json")
