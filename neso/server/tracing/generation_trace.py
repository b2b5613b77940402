"""What a trace tells of generated text, by OpenTelemetry's conventions for generative models."""

from __future__ import annotations

import time
from typing import Any

from neso.generation import GenerationOutput, GenerationRequest
from neso.server.tracing.model_trace import ModelTrace


class GenerationTrace:
    """Follows one generation: it waits, its prompt is computed (prefill), then it goes token by token (decode)."""

    def __init__(self, trace: ModelTrace, request: GenerationRequest) -> None:
        self._trace = trace
        self._started = time.monotonic_ns()
        self._scheduled = 0
        self._first_token = 0
        self._finish_reasons: dict[int, str] = {}
        trace.attributes.update(_request_attributes(trace.model_name, request))

    def observe(self, output: GenerationOutput) -> None:
        """An output has come."""
        if not self._first_token:
            self._first_token = time.monotonic_ns()
            self._scheduled = output.scheduled_ns or self._started
        for delta in output.deltas:
            if delta.finish_reason is not None:
                self._finish_reasons[delta.index] = delta.finish_reason.value
        attributes, usage = self._trace.attributes, output.usage
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        attributes["gen_ai.response.id"] = output.request_id

    def end(self, now: int) -> None:
        """There will be no more outputs."""
        trace = self._trace
        if self._finish_reasons:
            reasons = [reason for _, reason in sorted(self._finish_reasons.items())]
            trace.attributes["gen_ai.response.finish_reasons"] = reasons
        if not self._first_token:
            trace.phases.append(("queue", self._started, now))  # how long of it in the queue, nobody has told
            return
        trace.attributes["gen_ai.response.time_to_first_chunk"] = (self._first_token - self._started) * 1e-9
        trace.phases.append(("queue", self._started, self._scheduled))
        trace.phases.append(("prefill", self._scheduled, self._first_token))
        trace.phases.append(("decode", self._first_token, now))


def _request_attributes(model: str, request: GenerationRequest) -> dict[str, Any]:
    sampling = request.sampling
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "neso",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    optional = {
        "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stop_sequences": list(sampling.stop) or None,
        "gen_ai.request.top_k": float(sampling.top_k) if sampling.top_k > 0 else None,
    }
    return attributes | {name: value for name, value in optional.items() if value is not None}
