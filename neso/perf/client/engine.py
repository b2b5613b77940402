"""In-process engine: measures a model without a server."""

from __future__ import annotations

import time
from typing import Any

from neso.perf.client.target import OnFirstOutput, TaskTarget
from neso.perf.endpoints.base import History, add_output
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.errors import PerfError
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest


class EngineTarget(TaskTarget):
    """Sends requests to an engine process through the engine's client, as the server does."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine = engine

    @classmethod
    async def open(cls, options: EndpointOptions) -> EngineTarget:
        """Load the first model: a checkpoint, or the name of one that ships. Raises `PerfError`."""
        from neso.engine.client.async_engine import AsyncEngine
        from neso.engine.config import EngineConfig
        from neso.engine.errors import EngineError
        from neso.engine.weights.hub import ModelNotFound, resolve_model

        pairs = [text.partition("=") for text in options.engine_config]
        for name, separator, _ in pairs:
            if not separator:
                raise PerfError(f"--engine-config: expected KEY=VALUE, got '{name}'")
        try:
            model = str(resolve_model(options.models[0]))
            config = EngineConfig.from_options(model, {name: value for name, _, value in pairs})
            return cls(await AsyncEngine.start(config))
        except (ModelNotFound, EngineError, ValueError) as error:
            raise PerfError(f"the engine does not start: {error}") from None

    async def send(
        self,
        request: PerfRequest,
        record: RequestRecord,
        history: History,
        cancel_after: float | None = None,
        on_first_output: OnFirstOutput | None = None,
    ) -> None:
        await self._run(self._generate(request, record, on_first_output), record, cancel_after)

    async def _generate(
        self, request: PerfRequest, record: RequestRecord, on_first_output: OnFirstOutput | None
    ) -> None:
        from neso.engine.errors import EngineError
        from neso.generation.errors import InvalidParameter

        try:
            async for output in self._engine.generate(_generation_request(request, record)):
                now = time.monotonic_ns()
                if not record.first_byte_ns:
                    record.first_byte_ns = now
                for completion in output.outputs:
                    if completion.token_ids:
                        add_output(record, completion.text, now)
                        record.event_tokens.append(len(completion.token_ids))
                if on_first_output is not None and record.arrivals_ns:
                    on_first_output()
                record.input_tokens = output.usage.prompt_tokens
                record.output_tokens = output.usage.completion_tokens
                record.cached_tokens = output.usage.cached_tokens
            if not record.arrivals_ns:
                record.error_kind, record.error_message = "empty", "the response has no output"
        except InvalidParameter as error:
            record.error_kind, record.error_message = "build", str(error)
        except EngineError as error:
            record.error_kind, record.error_message = "stream", str(error)

    async def close(self) -> None:
        await self._engine.stop()


def _generation_request(request: PerfRequest, record: RequestRecord) -> Any:
    from neso.generation.request import GenerationRequest, LoraRequest
    from neso.generation.sampling_params import SamplingParams

    fields: dict[str, Any] = {"temperature": 0.0, **request.extra}
    if request.max_tokens is not None:
        fields["max_tokens"] = request.max_tokens
    if request.min_tokens is not None:
        fields["min_tokens"] = request.min_tokens
    prompt: Any = request.token_ids if request.token_ids is not None else f"{request.system}{request.text}"
    lora = LoraRequest(name=request.adapter) if request.adapter else None
    try:
        return GenerationRequest(prompt, SamplingParams(**fields), lora=lora)
    except TypeError as error:
        from neso.generation.errors import InvalidParameter

        raise InvalidParameter("extra", str(error)) from None
