"""One response being generated."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from neso.frontends.openai.answers.answer import finish_name
from neso.frontends.openai.answers.logprobs import chat_logprobs
from neso.frontends.openai.chat.message_reader import MessageEvent, MessageReader, Reasoning
from neso.frontends.openai.errors import ApiError
from neso.frontends.openai.models.targets import Target
from neso.frontends.openai.responses.output import Event
from neso.frontends.openai.responses.response import Response
from neso.frontends.openai.tool_parsers import Content, ToolCallStart
from neso.generation import Completion, GenerationOutput, GenerationRequest, InvalidParameter
from neso.server.tracing import Trace


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
