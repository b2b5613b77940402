"""A response object and its generation as a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from neso.frontends.openai.chat.message_format import MessageEvent, MessageParser, Reasoning
from neso.frontends.openai.choices import finish_reason_name
from neso.frontends.openai.errors import ApiError, to_api_error
from neso.frontends.openai.logprobs import chat_logprobs
from neso.frontends.openai.model_resolver import ResolvedModel
from neso.frontends.openai.responses.chat_conversion import new_id
from neso.frontends.openai.responses.output_items import Event, OutputItems, dump_json
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

if TYPE_CHECKING:
    from neso.server.tracing import Trace

TERMINAL_STATUSES = frozenset({"completed", "incomplete", "failed", "cancelled"})


class Response:
    """State of a response of the Responses API."""

    def __init__(self, request: ResponseRequest, sampling: SamplingParams) -> None:
        self.id = new_id("resp")
        self.status = "queued" if request.background else "in_progress"
        self.output = OutputItems()
        self.usage: Usage | None = None
        self.reasoning_tokens = 0
        self._created_at = int(time.time())
        self._completed_at: int | None = None
        self._incomplete_reason: str | None = None
        self._error: dict[str, str] | None = None
        self._request_fields = _request_fields(request, sampling)

    @property
    def has_ended(self) -> bool:
        return self.status in TERMINAL_STATUSES

    def complete(self) -> None:
        """End the response: the model ended its output."""
        self.status = "completed"
        self._completed_at = int(time.time())

    def truncate(self) -> None:
        """End the response as incomplete: the output reached its maximum length."""
        self.status = "incomplete"
        self._incomplete_reason = "max_output_tokens"

    def fail(self, code: str, message: str) -> None:
        """End the response with an error: generation failed."""
        self.status = "failed"
        self._error = {"code": code, "message": message}

    def cancel(self) -> None:
        """End the response as cancelled by the client."""
        self.status = "cancelled"
        if self.output.as_list():
            self.output.finish(complete=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object, a `ResponseObject`."""
        reason = self._incomplete_reason
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._completed_at,
            "status": self.status,
            "error": self._error,
            "incomplete_details": None if reason is None else {"reason": reason},
            **self._request_fields,
            "output": self.output.as_list(),
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


class ResponseRun:
    """Generates `response`. `parser` parses the text; `to_client_error` converts engine errors."""

    def __init__(
        self,
        response: Response,
        model: ResolvedModel,
        generation: GenerationRequest,
        parser: MessageParser,
        *,
        to_client_error: Callable[[InvalidParameter], ApiError],
        trace: Trace | None,
    ) -> None:
        self.response = response
        self._model = model
        self._generation = generation
        self._parser = parser
        self._to_client_error = to_client_error
        self._trace = trace
        self._started = False
        self._logprobs: list[
            dict[str, Any]
        ] = []  # log probabilities of tokens whose text the parser holds back

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """Yield all events of the response; events of one engine output are grouped.

        Raises `ApiError` and the errors of `Model.generate`; errors of a rejected request are raised before the first
        event, unless the response was queued. Closing the generator aborts generation.
        """
        if self.response.status == "queued":
            yield [self._state_event("created"), self._state_event("queued")]
        try:
            async with aclosing(self._model.generate(self._generation, self._trace)) as outputs:
                async for output in outputs:
                    if events := self._start_events() + self._output_events(output):
                        yield events
                    if self._parser.cut_off:
                        return  # the rest would not be sent
        except InvalidParameter as error:
            raise self._to_client_error(error) from None

    async def encoded_events(self) -> AsyncGenerator[list[bytes], None]:
        """Yield `events` as server-sent events. An error after the first event becomes the event `response.failed`."""
        number = 0

        def encode(events: Sequence[Event]) -> list[bytes]:
            nonlocal number
            encoded = []
            for event in events:
                numbered = {"type": event["type"], "sequence_number": number, **event}
                name = event["type"].encode()
                encoded.append(b"event: " + name + b"\ndata: " + dump_json(numbered) + b"\n\n")
                number += 1
            return encoded

        async with aclosing(self.events()) as steps:
            try:
                async for events in steps:
                    yield encode(events)
            except Exception as error:
                if not number:
                    raise
                yield encode(self._fail(to_api_error(error)))

    def _fail(self, error: ApiError) -> list[Event]:
        response = self.response
        events = response.output.finish(complete=False) if response.output.as_list() else []
        code = "server_error" if error.status >= 500 else error.code or "invalid_prompt"
        response.fail(code, error.message)
        return [*events, self._state_event("failed")]

    def _start_events(self) -> list[Event]:
        if self._started:
            return []
        self._started = True
        was_queued, self.response.status = self.response.status == "queued", "in_progress"
        created = [] if was_queued else [self._state_event("created")]
        return [*created, self._state_event("in_progress")]

    def _output_events(self, output: GenerationOutput) -> list[Event]:
        self.response.usage = output.usage
        events = [event for completion in output.outputs for event in self._completion_events(completion)]
        if output.finished or self._parser.cut_off:
            events += self._end_events(output.outputs)
        return events

    def _completion_events(self, completion: Completion) -> list[Event]:
        if completion.logprobs:
            self._logprobs += chat_logprobs(completion.logprobs, self._model.language_model.text)
        parsed = self._parser.feed(completion.text, len(completion.token_ids))
        self.response.reasoning_tokens = self._parser.num_reasoning_tokens
        if completion.finish_reason is not None:
            parsed += self._parser.finish()
        return [event for one in parsed for event in self._message_events(one)]

    def _message_events(self, parsed: MessageEvent) -> list[Event]:
        output = self.response.output
        if isinstance(parsed, Content):
            logprobs, self._logprobs = self._logprobs, []
            for entry in logprobs:
                for token in (entry, *entry["top_logprobs"]):
                    token["bytes"] = token["bytes"] or []  # required in this API
            return output.add_content(parsed.text, logprobs)
        self._logprobs.clear()  # only content has log probabilities
        if isinstance(parsed, Reasoning):
            return output.add_reasoning(parsed.text)
        if isinstance(parsed, ToolCallStart):
            return output.start_call(parsed.name)
        return output.add_arguments(parsed.fragment)

    def _end_events(self, completions: list[Completion]) -> list[Event]:
        reason = next(
            (finish_reason_name(one.finish_reason) for one in completions if one.finish_reason), "stop"
        )
        is_truncated = reason == "length" or self._parser.cut_off
        events = self.response.output.finish(complete=not is_truncated)
        if is_truncated:
            self.response.truncate()
            return [*events, self._state_event("incomplete")]
        self.response.complete()
        return [*events, self._state_event("completed")]

    def _state_event(self, name: str) -> Event:
        return {"type": f"response.{name}", "response": self.response.as_dict()}


def _request_fields(request: ResponseRequest, sampling: SamplingParams) -> dict[str, Any]:
    """Return the request fields that the response repeats, with their defaults."""
    given = request.model_dump(exclude_none=True, by_alias=True)
    text = given.get("text", {})
    reasoning = given.get("reasoning", {})
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
        "tools": [{"parameters": None, "strict": None, **tool} for tool in given.get("tools", [])],
        "tool_choice": given.get("tool_choice", "auto"),
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
