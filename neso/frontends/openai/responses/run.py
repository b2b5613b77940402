"""Events of a response as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from neso.frontends.openai.chat.message_format import MessageEvent, MessageReader, Reasoning
from neso.frontends.openai.choices import finish_name
from neso.frontends.openai.errors import ApiError, to_api_error
from neso.frontends.openai.logprobs import chat_logprobs
from neso.frontends.openai.model_resolver import Target
from neso.frontends.openai.responses.chat_conversion import Item, new_id
from neso.frontends.openai.responses.output_items import Event, ResponseOutput, json_text
from neso.frontends.openai.responses.schemas import ResponseRequest
from neso.frontends.openai.tool_parsers import Content, ToolCallStart
from neso.generation import (
    Completion,
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    SamplingParams,
    Usage,
)
from neso.server.tracing import Trace

ENDED = frozenset({"completed", "incomplete", "failed", "cancelled"})


class Response:
    """One response. What the request says is told again as it was understood."""

    def __init__(self, request: ResponseRequest, sampling: SamplingParams) -> None:
        self.id = new_id("resp")
        self.status = "queued" if request.background else "in_progress"
        self.output = ResponseOutput()
        self.usage: Usage | None = None
        self.reasoning_tokens = 0
        self._created_at = int(time.time())
        self._completed_at: int | None = None
        self._incomplete_reason: str | None = None
        self._error: dict[str, str] | None = None
        self._said = _as_understood(request, sampling)

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def items(self) -> list[Item]:
        """What the model said, as items."""
        return self.output.items

    def complete(self) -> None:
        """The model came to an end by itself."""
        self.status = "completed"
        self._completed_at = int(time.time())

    def cut_short(self) -> None:
        """The model had more to say than it may."""
        self.status = "incomplete"
        self._incomplete_reason = "max_output_tokens"

    def fail(self, code: str, message: str) -> None:
        """The response could not be made."""
        self.status = "failed"
        self._error = {"code": code, "message": message}

    def cancel(self) -> None:
        """The client wants no more of it."""
        self.status = "cancelled"
        if self.items:
            self.output.finish(complete=False)

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of the API."""
        reason = self._incomplete_reason
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._completed_at,
            "status": self.status,
            "error": self._error,
            "incomplete_details": None if reason is None else {"reason": reason},
            **self._said,
            "output": self.items,
            "usage": self._usage() if self.has_ended else None,
        }

    def _usage(self) -> dict[str, Any] | None:
        usage = self.usage
        if usage is None:
            return None
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _as_understood(request: ResponseRequest, sampling: SamplingParams) -> dict[str, Any]:
    """The fields of the request that are fields of the response too, with their defaults."""
    said = request.model_dump(exclude_none=True, by_alias=True)
    text = said.get("text", {})
    reasoning = said.get("reasoning", {})
    return {
        "model": request.model,
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "background": bool(request.background),
        "store": request.is_stored,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": request.top_logprobs or 0,
        "tools": [{"parameters": None, "strict": None, **tool} for tool in said.get("tools", [])],
        "tool_choice": said.get("tool_choice", "auto"),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": {"format": {"type": "text"}, **text},
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "truncation": request.truncation or "disabled",
        "metadata": request.metadata or {},
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "service_tier": "default",
    }


class ResponseRun:
    """Generates `response`.

    `reader` reads its text. `explain` words an engine's refusal for the client.
    """

    def __init__(
        self,
        response: Response,
        target: Target,
        generation: GenerationRequest,
        reader: MessageReader,
        *,
        explain: Callable[[InvalidParameter], ApiError],
        trace: Trace | None,
    ) -> None:
        self.response = response
        self._target = target
        self._generation = generation
        self._reader = reader
        self._explain = explain
        self._trace = trace
        self._begun = False
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text the reader still holds

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """The events of the response, those of one step together, the first and the last ones included.

        Raises `ApiError` and what the core raises; for a request that the engine does not take before the first event,
        unless that told that the response is queued. Closing the generator early aborts the generation.
        """
        if self.response.status == "queued":
            yield [self._state("created"), self._state("queued")]
        try:
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    if events := self._begin() + self._take(output):
                        yield events
                    if self._reader.cut_off:
                        return  # nobody reads on, so nothing more need be generated
        except InvalidParameter as error:
            raise self._explain(error) from None

    def failed(self, error: ApiError) -> list[Event]:
        """End the response, which cannot go on; the events that tell of it."""
        events = self.response.output.finish(complete=False) if self.response.items else []
        code = "server_error" if error.status >= 500 else error.code or "invalid_prompt"
        self.response.fail(code, error.message)
        return [*events, self._state("failed")]

    def _outputs(self) -> AsyncGenerator[GenerationOutput, None]:
        return self._target.generate(self._generation, self._trace)

    def _begin(self) -> list[Event]:
        """What to tell before the first output's events."""
        if self._begun:
            return []
        self._begun = True
        was_queued, self.response.status = self.response.status == "queued", "in_progress"
        return [*([] if was_queued else [self._state("created")]), self._state("in_progress")]

    def _take(self, output: GenerationOutput) -> list[Event]:
        self.response.usage = output.usage
        events = [event for delta in output.deltas for event in self._add(delta)]
        return events + self._end(output.deltas) if output.finished or self._reader.cut_off else events

    def _end(self, deltas: list[Completion]) -> list[Event]:
        reason = next((finish_name(delta.finish_reason) for delta in deltas if delta.finish_reason), "stop")
        is_cut = reason == "length" or self._reader.cut_off
        events = self.response.output.finish(complete=not is_cut)
        if is_cut:
            self.response.cut_short()
            return [*events, self._state("incomplete")]
        self.response.complete()
        return [*events, self._state("completed")]

    def _add(self, delta: Completion) -> list[Event]:
        if delta.logprobs:
            self._logprobs += chat_logprobs(delta.logprobs, self._target.language_model.text)
        read = self._reader.feed(delta.text, len(delta.token_ids))
        self.response.reasoning_tokens = self._reader.num_reasoning_tokens
        if delta.finish_reason is not None:
            read += self._reader.finish()
        return [event for one in read for event in self._from(one)]

    def _from(self, read: MessageEvent) -> list[Event]:
        if isinstance(read, Content):
            return self._content(read.text)
        self._logprobs.clear()  # of the thought's or the call's own text
        if isinstance(read, Reasoning):
            return self.response.output.reasoning(read.text)
        if isinstance(read, ToolCallStart):
            return self.response.output.call(read.name)
        return self.response.output.arguments(read.fragment)

    def _content(self, text: str) -> list[Event]:
        logprobs, self._logprobs = self._logprobs, []
        for entry in logprobs:
            for token in (entry, *entry["top_logprobs"]):
                token["bytes"] = token["bytes"] or []  # which here is no optional field
        return self.response.output.content(text, logprobs)

    def _state(self, name: str) -> Event:
        return {"type": f"response.{name}", "response": self.response.as_dict()}


class EventWriter:
    """Numbers the events of one response and writes them."""

    def __init__(self) -> None:
        self._next = 0

    def write(self, events: Sequence[Event]) -> list[bytes]:
        """The events as they go over the wire."""
        written = []
        for event in events:
            numbered = {"type": event["type"], "sequence_number": self._next, **event}
            written.append(b"event: " + event["type"].encode() + b"\ndata: " + json_text(numbered) + b"\n\n")
            self._next += 1
        return written


async def written_events(run: ResponseRun) -> AsyncGenerator[list[bytes], None]:
    """The events of `run`, as they go over the wire, those of one step together.

    Raises what comes before the first event; an error after it is told by the last event.
    """
    writer = EventWriter()
    begun = False
    async with aclosing(run.events()) as steps:
        try:
            async for events in steps:
                yield writer.write(events)
                begun = True
        except Exception as error:
            if not begun:
                raise
            yield writer.write(run.failed(to_api_error(error)))
