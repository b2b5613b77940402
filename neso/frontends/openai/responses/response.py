"""The response object, from its creation to its end."""

from __future__ import annotations

import time
from typing import Any

from neso.frontends.openai.responses.conversation import Item, new_id
from neso.frontends.openai.responses.output import ResponseOutput
from neso.frontends.openai.responses.schemas import ResponseRequest
from neso.generation import SamplingParams, Usage

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
