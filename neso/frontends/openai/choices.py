"""Responses with choices: completions and chat completions, complete or streamed."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from starlette.types import Receive, Scope, Send

from neso.frontends.openai.errors import ApiError, invalid
from neso.frontends.openai.logprobs import prompt_logprobs
from neso.frontends.openai.request_params import Prompt, generation_request
from neso.frontends.openai.schemas import GenerationFields
from neso.frontends.openai.sse import DONE, SSE_START, error_event
from neso.generation import (
    Completion,
    FinishReason,
    GenerationOutput,
    InvalidParameter,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from neso.generation.pooling import MAX_TASKS_PER_TURN

if TYPE_CHECKING:
    from neso.frontends.openai.model_resolver import ResolvedModel
    from neso.server.tracing import Trace

Output = TypeVar("Output")
_MAX_MERGED = 64


@dataclass(frozen=True, slots=True)
class ResponseKind:
    """Differences between completions and chat completions.

    object, chunk_object: field `object` of complete responses and of chunks.
    add_special_tokens: default for the prompt; chat templates write special tokens themselves.
    prompt_fields_in_choices: whether `prompt_token_ids` and `prompt_logprobs` are fields of the choices.
    """

    id_prefix: str
    object: str
    chunk_object: str
    add_special_tokens: bool
    prompt_fields_in_choices: bool


class PromptRecord:
    """Prompt data reported by the engine. `echo`: the prompt text, if the choices begin with it."""

    def __init__(self, request: GenerationFields, echo: str = "") -> None:
        self.echo = echo
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self._request = request

    def fields(self) -> dict[str, Any]:
        """Return the requested fields of the prompt."""
        request = self._request
        fields: dict[str, Any] = {}
        if request.return_token_ids:
            fields["prompt_token_ids"] = self.token_ids
        if request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self.logprobs, request.prompt_logprobs)
        return fields


class Timings:
    """Measures the phases of a request, for `return_timings`. The names are those of llama.cpp's server."""

    def __init__(self) -> None:
        self._received = time.monotonic_ns()
        self._scheduled = self._first = self._last = 0

    def record(self, output: GenerationOutput) -> None:
        """Note the time of an output."""
        self._last = time.monotonic_ns()
        self._scheduled = self._scheduled or output.scheduled_ns
        self._first = self._first or self._last

    def fields(self, usage: Sequence[Usage]) -> dict[str, Any]:
        """Return milliseconds of the phases and numbers of tokens.

        The queue ends when the prefill starts, the prefill with the first token. `queue_ms` is 0 for models that do not
        report the start.
        """
        first = self._first or self._received
        scheduled = min(max(self._scheduled, self._received), first) if self._scheduled else self._received
        prompt_tokens = sum(each.prompt_tokens for each in usage)
        cached_tokens = sum(each.cached_tokens for each in usage)
        return {
            "queue_ms": (scheduled - self._received) / 1e6,
            "prompt_ms": (first - scheduled) / 1e6,
            "predicted_ms": (max(self._last, first) - first) / 1e6,
            "prompt_n": prompt_tokens - cached_tokens,
            "cache_n": cached_tokens,
            "predicted_n": sum(each.completion_tokens for each in usage),
            "draft_n": sum(each.draft_tokens for each in usage),
            "draft_n_accepted": sum(each.accepted_draft_tokens for each in usage),
        }


class Choice(ABC):
    """A choice of a response. It is either streamed with `stream`, or collected with `add` and `whole`."""

    num_reasoning_tokens = 0
    finish_reason: str | None = None
    cut_off = False
    """Whether the response ends before the generated text; later text is not sent."""

    @abstractmethod
    def stream(self, completion: Completion) -> list[dict[str, Any]]:
        """Return the chunk choices of one step: at least one if it has tokens."""

    @abstractmethod
    def add(self, completion: Completion) -> None:
        """Append newly generated text."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the complete choice."""


class ChoicesResponse:
    """A response with `n` choices per prompt. A streamed response is an ASGI application.

    `choices` starts with the choices of the first prompt. `to_client_error` converts engine errors. `count_completion`
    False reports 0 completion tokens.
    """

    def __init__(
        self,
        kind: ResponseKind,
        request: GenerationFields,
        model: ResolvedModel,
        prompts: Sequence[PromptRecord],
        choices: Sequence[Choice],
        to_client_error: Callable[[InvalidParameter], ApiError],
        *,
        count_completion: bool = True,
    ) -> None:
        self.id = f"{kind.id_prefix}-{uuid.uuid4().hex}"
        self._kind = kind
        self._request = request
        self._model = model
        self._prompts = prompts
        self._choices = choices
        self._n = request.n or 1
        self._to_client_error = to_client_error
        self._count_completion = count_completion
        self._usage: list[Usage | None] = [None] * len(prompts)
        self._timings = Timings() if request.return_timings else None

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        trace: Trace | None = None,
        images: tuple[Any, ...] = (),
    ) -> Any:
        """Generate. Returns the JSON object, or for a stream an ASGI application after the first chunk.

        `images` are used for every prompt. Raises `ApiError` and the errors of `Model.generate`.
        """
        if self._request.return_token_ids and not self._model.has_token_ids:
            raise invalid(
                "return_token_ids", "Invalid 'return_token_ids': the model returns text but no tokens."
            )
        requests = [
            generation_request(
                self._request,
                prompt,
                sampling,
                self.id if len(prompts) == 1 else f"{self.id}-{number}",
                lora_name=self._model.lora_name,
                add_special_tokens=self._kind.add_special_tokens,
                images=images,
            )
            for number, prompt in enumerate(prompts)
        ]
        generations = [self._model.generate(request, trace) for request in requests]
        # A single generation is read directly, without `merge`.
        self._merged = len(generations) > 1
        self._outputs: AsyncGenerator[Any, None] = merge(generations) if self._merged else generations[0]
        try:
            return await self._start_stream() if self._request.stream else await self._collect()
        except InvalidParameter as error:
            raise self._to_client_error(error) from None

    async def _collect(self) -> dict[str, Any]:
        async with aclosing(self._outputs):
            async for item in self._outputs:
                number, output = item if self._merged else (0, item)
                self._record(number, output)
                for completion in output.outputs:
                    self._choices[number * self._n + completion.index].add(completion)
        response = self._envelope(self._kind.object)
        response["choices"] = [choice.whole() for choice in self._choices]
        response["usage"] = self._total_usage()
        if not self._kind.prompt_fields_in_choices:
            response |= self._prompts[0].fields()
        if self._timings is not None:
            response["timings"] = self._timings.fields(self._known_usage())
        return response

    async def _start_stream(self) -> ChoicesResponse:
        """Read up to the first chunk. Errors before it can be sent as an HTTP status."""
        options = self._request.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous_usage = options is not None and bool(options.continuous_usage_stats)
        self._head = b"data: " + orjson.dumps(self._envelope(self._kind.chunk_object))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"
        self._prompt_fields_sent = self._kind.prompt_fields_in_choices
        self._ended = False
        self._first = b""
        async for item in self._outputs:
            if chunks := self._chunks(*item) if self._merged else self._chunks(0, item):
                self._first = chunks
                break
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._outputs):
            await send(SSE_START)
            if self._first:
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
            last = b""
            while not self._ended:
                try:
                    item = await anext(self._outputs)
                    chunks = self._chunks(*item) if self._merged else self._chunks(0, item)
                except StopAsyncIteration:
                    break
                except InvalidParameter as error:
                    last = error_event(self._to_client_error(error))
                    break
                except Exception as error:
                    last = error_event(error)
                    break
                if chunks:
                    await send({"type": "http.response.body", "body": chunks, "more_body": True})
            if not last:
                last = DONE
                if self._include_usage or self._timings is not None:
                    end: dict[str, Any] = {"usage": self._total_usage()} if self._include_usage else {}
                    if self._timings is not None:
                        end["timings"] = self._timings.fields(self._known_usage())
                    last = self._head + b"]," + orjson.dumps(end)[1:] + b"\n\n" + DONE
            await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _chunks(self, number: int, output: GenerationOutput) -> bytes:
        """Return the events for an output of prompt `number`; empty if it has no tokens."""
        self._record(number, output)
        chunks = b""
        for completion in output.outputs:
            choice = self._choices[number * self._n + completion.index]
            for chunk in choice.stream(completion):
                extra: dict[str, Any] = {"usage": self._total_usage()} if self._continuous_usage else {}
                if not self._prompt_fields_sent:
                    self._prompt_fields_sent = True
                    extra |= self._prompts[0].fields()
                if extra:
                    extra = {"usage": None, **extra} if self._include_usage else extra
                    tail = b"]," + orjson.dumps(extra)[1:] + b"\n\n"
                else:
                    tail = self._tail
                chunks += self._head + orjson.dumps(chunk) + tail
            if choice.cut_off and all(choice.finish_reason is not None for choice in self._choices):
                self._ended = True
        return chunks

    def _record(self, number: int, output: GenerationOutput) -> None:
        self._usage[number] = output.usage
        if self._timings is not None:
            self._timings.record(output)
        if output.prompt_token_ids:  # only in the first output
            self._prompts[number].token_ids = output.prompt_token_ids
        if output.prompt_logprobs:
            self._prompts[number].logprobs = output.prompt_logprobs

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": self._request.model,
            "system_fingerprint": None,
        }

    def _known_usage(self) -> list[Usage]:
        return [usage for usage in self._usage if usage is not None]

    def _total_usage(self) -> dict[str, Any]:
        known = self._known_usage()
        prompt = sum(usage.prompt_tokens for usage in known)
        completion = sum(usage.completion_tokens for usage in known) if self._count_completion else 0
        total: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in known)},
        }
        reasoning = sum(choice.num_reasoning_tokens for choice in self._choices)
        if reasoning:
            total["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return total


def finish_reason_name(reason: FinishReason | None) -> str | None:
    """Return OpenAI's name of a finish reason. Raises `ApiError` for failures."""
    if reason is FinishReason.ERROR:
        raise ApiError(500, "The engine could not go on with this request.")
    if reason is FinishReason.ABORT:
        raise ApiError(503, "The request was aborted by the server.")
    return None if reason is None else reason.value


async def merge(
    generators: Sequence[AsyncGenerator[Output, None]],
) -> AsyncGenerator[tuple[int, Output], None]:
    """Yield the outputs of all generators as they arrive, each with the index of its generator.

    The first exception ends the stream, ahead of queued outputs, so that a request with one invalid prompt is rejected
    before anything is sent. All generators are closed at the end, which aborts unfinished requests. They wait while
    `_MAX_MERGED` outputs are not taken.
    """
    queue: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue(_MAX_MERGED)
    errors: list[Exception] = []

    async def pump(index: int, generator: AsyncGenerator[Output, None]) -> None:
        try:
            async with aclosing(generator):
                async for output in generator:
                    await queue.put((index, output))
        except Exception as error:
            errors.append(error)
        await queue.put(None)

    pumps: list[asyncio.Task[None]] = []
    running = len(generators)
    try:
        for index, generator in enumerate(generators):
            pumps.append(asyncio.create_task(pump(index, generator)))
            if index % MAX_TASKS_PER_TURN == MAX_TASKS_PER_TURN - 1:
                await asyncio.sleep(0)
        while running:
            item = await queue.get()
            if errors:
                raise errors.pop(0)  # the list would be part of a reference cycle
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
