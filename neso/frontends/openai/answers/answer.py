"""From generations to an answer: gathered into one object, or streamed as chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response

from neso.frontends.openai.answers.merge import Indexed, merge
from neso.frontends.openai.answers.prompt_record import PromptRecord
from neso.frontends.openai.answers.sse import DONE, ChunkWriter, EventStream
from neso.frontends.openai.answers.usage import UsageTotals
from neso.frontends.openai.errors import ApiError, invalid
from neso.frontends.openai.models.targets import Target
from neso.frontends.openai.requests.prompts import Prompt
from neso.frontends.openai.requests.schemas import GenerationFields
from neso.generation import (
    Completion,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    LoraRequest,
    SamplingParams,
)
from neso.server.tracing import Trace


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
