"""From generations to an answer: gathered into one object, or streamed as chunks."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from neso.frontends.openai.errors import ApiError, invalid, to_api_error
from neso.frontends.openai.logprobs import prompt_logprobs
from neso.frontends.openai.request_params import Prompt
from neso.frontends.openai.schemas import GenerationFields
from neso.generation import (
    Completion,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    LoraRequest,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from neso.server.tracing import Trace

if TYPE_CHECKING:
    from neso.frontends.openai.model_resolver import Target


class UsageTotals:
    """The newest usage of every generation, and their sum."""

    def __init__(self, generations: int) -> None:
        self._latest: list[Usage | None] = [None] * generations

    def update(self, generation: int, usage: Usage) -> None:
        """Note how far a generation has come."""
        self._latest[generation] = usage

    def as_dict(self, *, count_completion: bool = True) -> dict[str, Any]:
        """OpenAI's usage object."""
        known = [usage for usage in self._latest if usage is not None]
        prompt = sum(usage.prompt_tokens for usage in known)
        completion = sum(usage.completion_tokens for usage in known) if count_completion else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in known)},
        }


Indexed = tuple[int, GenerationOutput]


async def merge(generations: Sequence[AsyncIterator[GenerationOutput]]) -> AsyncGenerator[Indexed, None]:
    """The outputs of all, as they come, each with the position of its generation.

    The first error ends the stream, ahead of outputs that wait: a request that is refused for one of its
    prompts is refused before anything is sent. However the stream ends, every generation is closed, which
    aborts the unfinished.
    """
    if len(generations) == 1:
        async with aclosing(_closable(generations[0])) as generation:
            async for output in generation:
                yield 0, output
        return
    queue: asyncio.Queue[Indexed | None] = asyncio.Queue()
    errors: list[Exception] = []
    pumps = [asyncio.create_task(_pump(queue, errors, i, _closable(g))) for i, g in enumerate(generations)]
    running = len(pumps)
    try:
        while running:
            item = await queue.get()
            if errors:
                raise errors[0]
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    queue: asyncio.Queue[Indexed | None],
    errors: list[Exception],
    index: int,
    generation: AsyncGenerator[GenerationOutput, None],
) -> None:
    try:
        async with aclosing(generation):
            async for output in generation:
                queue.put_nowait((index, output))
    except Exception as error:
        errors.append(error)
    queue.put_nowait(None)


def _closable(generation: AsyncIterator[GenerationOutput]) -> AsyncGenerator[GenerationOutput, None]:
    """The contract of `LanguageModel.generate` is that its iterator has `aclose`; its type cannot say so."""
    return cast("AsyncGenerator[GenerationOutput, None]", generation)


class PromptRecord:
    """Keeps what the engine tells of a prompt once, with whichever choice is first. `echo` is its text, if wanted."""

    def __init__(self, request: GenerationFields, echo: str = "") -> None:
        self.echo = echo
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self._request = request

    def note(self, output: GenerationOutput) -> None:
        """Keep what the first output says of the prompt."""
        self.token_ids = self.token_ids or output.prompt_token_ids
        self.logprobs = self.logprobs or output.prompt_logprobs or []

    def about(self) -> dict[str, Any]:
        """The fields that the client asked for."""
        request = self._request
        about: dict[str, Any] = {}
        if request.return_token_ids:
            about["prompt_token_ids"] = self.token_ids
        if request.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_logprobs(self.logprobs, request.prompt_logprobs)
        return about


DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx holds the events back
]


class ChunkWriter:
    """Writes the chunks of one answer. What all of them share is serialized once."""

    def __init__(self, envelope: dict[str, Any], *, include_usage: bool) -> None:
        self._head = b"data: " + orjson.dumps(envelope)[:-1] + b',"choices":['
        self._has_usage = include_usage
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        """A chunk with one choice, and perhaps further fields, such as the usage so far."""
        if not extra:
            return self._head + orjson.dumps(choice) + self._tail
        if self._has_usage:
            extra = {"usage": None, **extra}
        return self._head + orjson.dumps(choice) + b"]," + orjson.dumps(extra)[1:] + b"\n\n"

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk that ends a stream whose client asked for usage: it has no choices."""
        return self._head + b'],"usage":' + orjson.dumps(usage) + b"}\n\n"


class EventStream:
    """A response of events, itself an ASGI application that sends them.

    Make it with `open`, which waits for the first event: until then an error can still be an HTTP status.
    """

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        self._first = first
        self._events = events

    @classmethod
    async def open(cls, events: AsyncGenerator[bytes, None]) -> EventStream:
        """Start the stream. Raises whatever `events` raises before its first event."""
        return cls(await anext(events), events)

    @classmethod
    def of(cls, events: AsyncGenerator[bytes, None]) -> EventStream:
        """A stream that begins at once, and may have no events."""
        return cls(b"", events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            if self._first:
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
            while (event := await self._next()) is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes | None:
        """The next event; an error is the last one, since the status is sent already."""
        try:
            return await anext(self._events, None)
        except Exception as error:
            return b"data: " + to_api_error(error).body() + b"\n\n"


@dataclass(frozen=True, slots=True)
class AnswerKind:
    """What tells completions and chats apart.

    `adds_special_tokens` is for a client that does not say: a chat template writes its special tokens itself.
    """

    id_prefix: str
    whole: str
    chunk: str
    adds_special_tokens: bool


class Choice(ABC):
    """One choice of an answer. It is either streamed or gathered, never both."""

    @abstractmethod
    def stream(self, output: GenerationOutput, delta: Completion) -> list[dict[str, Any]]:
        """The choices of the chunks that a delta makes: none, one or several."""

    @abstractmethod
    def gather(self, output: GenerationOutput, delta: Completion) -> None:
        """Take a delta in."""

    @abstractmethod
    def gathered(self) -> dict[str, Any]:
        """The whole choice."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens so far that are reasoning."""
        return 0

    @property
    def cut_off(self) -> bool:
        """Whether it has ended before its text: what comes after is not told."""
        return False

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether its reason to end is known."""


class Answer:
    """The answer to one API request, which asks for one generation a prompt, of `n` choices each.

    `explain` words an engine's refusal for the client. `count_completion` False hides tokens that nobody
    asked for. `prompt`: what the answer, and not its choices, tells of a prompt.
    """

    def __init__(
        self,
        kind: AnswerKind,
        request: GenerationFields,
        target: Target,
        choices: Sequence[Choice],
        explain: Callable[[InvalidParameter], ApiError],
        *,
        count_completion: bool = True,
        prompt: PromptRecord | None = None,
    ) -> None:
        self.id = f"{kind.id_prefix}-{uuid.uuid4().hex}"
        self._kind = kind
        self._request = request
        self._target = target
        self._choices = choices
        self._n = request.n or 1
        self._explain = explain
        self._count_completion = count_completion
        self._prompt = prompt
        self._usage = UsageTotals(len(choices) // self._n)

    async def respond(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        trace: Trace | None = None,
        images: tuple[Any, ...] = (),
    ) -> Any:
        """Generate. Returns the response, an ASGI application; a stream goes on while that one runs.

        `images` are those of every prompt. Raises `ApiError` and what the core raises.
        """
        if self._request.return_token_ids and not self._target.tells_tokens:
            raise invalid(
                "return_token_ids", "Invalid 'return_token_ids': the model gives text, and no tokens."
            )
        outputs = merge(
            [self._target.generate(r, trace) for r in self._generations(prompts, sampling, images)]
        )
        if self._request.stream:
            return await EventStream.open(self._events(outputs))
        return await self._gather(outputs)

    def _generations(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, images: tuple[Any, ...]
    ) -> list[GenerationRequest]:
        return [
            generation_request(
                self._request,
                self._target,
                prompt,
                sampling,
                self.id if len(prompts) == 1 else f"{self.id}-{number}",
                add_special_tokens=self._kind.adds_special_tokens,
                images=images,
            )
            for number, prompt in enumerate(prompts)
        ]

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": self._request.model,
            "system_fingerprint": None,
        }

    async def _gather(self, outputs: AsyncGenerator[Indexed, None]) -> Response:
        try:
            async with aclosing(outputs):
                async for number, output in outputs:
                    self._note(number, output)
                    for delta in output.deltas:
                        self._choices[number * self._n + delta.index].gather(output, delta)
        except InvalidParameter as error:
            raise self._explain(error) from None
        body = self._envelope(self._kind.whole)
        body["choices"] = [choice.gathered() for choice in self._choices]
        body["usage"] = self._total_usage()
        if self._prompt is not None:
            body |= self._prompt.about()
        return Response(orjson.dumps(body), media_type="application/json")

    async def _events(self, outputs: AsyncGenerator[Indexed, None]) -> AsyncGenerator[bytes, None]:
        options = self._request.stream_options
        include_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        writer = ChunkWriter(self._envelope(self._kind.chunk), include_usage=include_usage)
        prompt = self._prompt  # until it has been told
        try:
            async with aclosing(outputs):
                async for number, output in outputs:
                    self._note(number, output)
                    extra: dict[str, Any] = {"usage": self._total_usage()} if continuous else {}
                    chunks: list[bytes] = []
                    cut_off = False
                    for delta in output.deltas:
                        choice = self._choices[number * self._n + delta.index]
                        for piece in choice.stream(output, delta):
                            about, prompt = {} if prompt is None else prompt.about(), None
                            chunks.append(writer.chunk(piece, {**extra, **about}))
                        cut_off = cut_off or choice.cut_off
                    if chunks:
                        yield chunks[0] if len(chunks) == 1 else b"".join(chunks)
                    if cut_off and all(choice.has_ended for choice in self._choices):
                        break  # nobody reads on, so nothing more need be generated
        except InvalidParameter as error:
            raise self._explain(error) from None
        yield writer.usage(self._total_usage()) + DONE if include_usage else DONE

    def _note(self, generation: int, output: GenerationOutput) -> None:
        self._usage.update(generation, output.usage)
        if self._prompt is not None:
            self._prompt.note(output)

    def _total_usage(self) -> dict[str, Any]:
        usage = self._usage.as_dict(count_completion=self._count_completion)
        reasoning = sum(choice.num_reasoning_tokens for choice in self._choices)
        if reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage


def generation_request(
    request: GenerationFields,
    target: Target,
    prompt: Prompt,
    sampling: SamplingParams,
    request_id: str,
    *,
    add_special_tokens: bool,
    images: tuple[Any, ...] = (),
) -> GenerationRequest:
    """What the engine is asked for one prompt. `add_special_tokens` is for a client that does not say."""
    special = request.add_special_tokens
    return GenerationRequest(
        prompt=[] if isinstance(prompt, np.ndarray) else prompt,
        prompt_embeds=prompt if isinstance(prompt, np.ndarray) else None,
        sampling=sampling,
        request_id=request_id,
        priority=request.priority or 0,
        add_special_tokens=add_special_tokens if special is None else special,
        cache_salt=request.cache_salt or "",
        images=images,
        stream=bool(request.stream),
        lora=LoraRequest(name=target.adapter) if target.adapter else None,
    )


def finish_name(reason: FinishReason | None) -> str | None:
    """OpenAI's name of a reason. Raises `ApiError` for those that are failures."""
    if reason is FinishReason.ERROR:
        raise ApiError(500, "The engine could not go on with this request.")
    if reason is FinishReason.ABORT:
        raise ApiError(503, "The request was aborted by the server.")
    return None if reason is None else reason.value
