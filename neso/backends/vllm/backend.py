"""`VllmBackend`: serves a vLLM engine with tensors, and through the text-generation and pooling interfaces."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from neso.backends.option_files import log_default_sampling
from neso.backends.request_tensors import tensor_error_text
from neso.backends.restarts import Restarts, restart_counter
from neso.backends.vllm import library
from neso.backends.vllm.conversion import IMAGES, image_data, parse_sampling_values
from neso.backends.vllm.engine import VllmEngine
from neso.backends.vllm.metrics import VllmMetrics
from neso.backends.vllm.model_files import Adapters, ModelFiles, Supervision, UnknownAdapter
from neso.backends.vllm.tensors import (
    EmbeddingRequest,
    ResponseTensors,
    TextRequest,
    complete_config,
    embedding_tensors,
    read_request,
)
from neso.backends.vllm.text_models import VllmLanguageModel, VllmPoolingModel, text_tools, vector_of
from neso.generation import InvalidParameter, LanguageModel, PoolingModel
from neso.server.backend import Backend, ModelContext
from neso.server.config.model_config import parse_bool, string_parameter
from neso.server.errors import InternalError, InvalidArgument, ServerError, Unavailable
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.log import request_fields
from neso.server.memory import release_memory
from neso.server.tensor import Tensor

logger = logging.getLogger(__name__)

DEATH_CHECK_SECONDS = 1.0
"""Seconds between two checks whether the engine has ended; vLLM has no callback for it."""
HEARTBEAT_SECONDS = 5.0
"""Seconds between two questions to the engine, whose answer shows that it does not hang."""
UNHEALTHY = "Model is unavailable due to unhealthy vLLM engine"


class VllmBackend(Backend):
    """Submits each request to vLLM immediately; vLLM's scheduler does the batching."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._engine: VllmEngine | None = None
        self._metrics: VllmMetrics | None = None
        self._adapters = Adapters(library.lora_request, enabled=False)
        self._language_model: VllmLanguageModel | None = None
        self._pooling_model: VllmPoolingModel | None = None
        self._checks_health = bool(parse_bool(string_parameter(context.config, "ENABLE_VLLM_HEALTH_CHECK")))
        self._unhealthy = False
        self._unloading: asyncio.Task[None] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._down = False  # the engine has failed too often and is not restarted
        self._sampling_types = library.sampling_fields()
        self._structured_output_fields = library.structured_outputs_fields()

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        complete_config(config)

    async def load(self) -> None:
        context = self.context
        started = time.perf_counter()
        files = ModelFiles.read(context.version_directory)
        arguments, ignored = await asyncio.to_thread(library.engine_arguments, files.arguments)
        if ignored:
            logger.warning(
                "model '%s': engine arguments without effect: %s", context.name, ", ".join(ignored)
            )
        self._metrics = self._make_metrics(arguments)
        arguments.disable_log_stats = self._metrics is None  # statistics are only collected for metrics
        try:
            engine = await VllmEngine.start(arguments, self._metrics.record if self._metrics else None)
        except BaseException:
            if self._metrics is not None:
                self._metrics.close()
            raise
        self._engine = engine
        self._adapters = Adapters(library.lora_request, files.adapters, enabled=bool(arguments.enable_lora))
        try:
            await self._create_text_models(engine, arguments)
        except BaseException:
            await self.unload()
            raise
        if not self._checks_health:  # otherwise the model is unloaded, as in Triton
            self._supervisor = asyncio.get_running_loop().create_task(
                self._supervise(engine, files.supervision)
            )
        # The server has frozen its objects (`freeze_gc`); also freeze vLLM's modules.
        if gc.get_freeze_count():
            await asyncio.to_thread(release_memory)
        logger.info(
            "model '%s' on vLLM %s in %.1f s, context %d tokens",
            *(context.name, library.VERSION, time.perf_counter() - started, engine.max_model_len),
        )

    async def _create_text_models(self, engine: VllmEngine, arguments: Any) -> None:
        """Create the text-generation and pooling interfaces that the model supports."""
        tokenizer = None if arguments.skip_tokenizer_init else await engine.tokenizer()
        source, revision = arguments.tokenizer, arguments.tokenizer_revision
        if not source:
            source, revision = arguments.model, arguments.revision
        text = await asyncio.to_thread(text_tools, str(source), revision, tokenizer)
        if "generate" in engine.tasks:
            defaults = await asyncio.to_thread(library.default_sampling, engine.model_config)
            self._language_model = VllmLanguageModel(engine, text, self._adapters, defaults)
            log_default_sampling(
                *(self.context.name, defaults),
                *(arguments.generation_config, arguments.override_generation_config),
            )
        if engine.tasks & {"embed", "classify"}:
            self._pooling_model = VllmPoolingModel(engine, text)

    def _make_metrics(self, arguments: Any) -> VllmMetrics | None:
        """Return None unless `REPORT_CUSTOM_METRICS` is set, as in Triton, and the engine collects statistics."""
        context = self.context
        enabled = parse_bool(string_parameter(context.config, "REPORT_CUSTOM_METRICS"))
        if not enabled or arguments.disable_log_stats:
            return None
        return VllmMetrics(context.metrics, lambda: 0 if self._engine is None else self._engine.num_requests)

    async def _supervise(self, engine: VllmEngine, options: Supervision) -> None:
        """Restart the engine when it has ended. Kill it when it hangs."""
        context = self.context
        counter = restart_counter(context.metrics)
        engine.restarts = True
        restarts = Restarts(options.max_restarts, counter, options.restart_window)

        async def restart() -> bool:
            await engine.restart()
            return True

        def failed(error: Exception) -> None:
            logger.error("model '%s': vLLM's engine could not be restarted: %s", context.name, error)

        while True:
            heartbeats = asyncio.get_running_loop().create_task(self._check_heartbeats(engine, options))
            try:
                while engine.alive:  # noqa: ASYNC110  vLLM has no event
                    await asyncio.sleep(DEATH_CHECK_SECONDS)
            finally:
                heartbeats.cancel()
            logger.error("model '%s': vLLM's engine has ended and is restarted", context.name)
            restarts.record_failure()
            if await restarts.restart(restart, failed) is None:
                self._down, engine.restarts = True, False
                logger.critical(
                    "model '%s': vLLM's engine has failed too often and is not restarted", context.name
                )
                return

    async def _check_heartbeats(self, engine: VllmEngine, options: Supervision) -> None:
        """Kill the engine when it does not answer; vLLM notices the end of its processes and fails their requests."""
        while engine.alive and options.step_timeout:
            await asyncio.sleep(min(HEARTBEAT_SECONDS, options.step_timeout))
            if await engine.answers(options.step_timeout):
                continue
            logger.error(
                "model '%s': vLLM's engine did not answer for %g s (step_timeout) and is killed",
                *(self.context.name, options.step_timeout),
            )
            engine.kill()
            return

    async def unload(self) -> None:
        await self.request_tasks.end()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))
        if self._engine is not None:
            await self._engine.stop()
        if self._metrics is not None:
            self._metrics.close()

    def ready(self) -> bool:
        return self._engine is not None and self._engine.alive and not self._unhealthy

    def live(self) -> bool:
        return not self._down

    @property
    def engine(self) -> VllmEngine:
        """The engine. Only available after `load`."""
        assert self._engine is not None, "the model is not loaded"
        return self._engine

    @property
    def language_model(self) -> LanguageModel | None:
        return self._language_model

    @property
    def pooling_model(self) -> PoolingModel | None:
        return self._pooling_model

    # -- tensor requests ----------------------------------------------------------------------------------------

    def submit(self, request: ResponseStream) -> None:
        self.request_tasks.start(request, self._respond(request))

    async def _respond(self, stream: ResponseStream) -> None:
        """Process one request. Errors are sent as a response."""
        stream.timeline.response_start = stream.timeline.queue_start
        try:
            if self._checks_health and not await self.engine.healthy():
                self._handle_unhealthy(stream)
                return
            request = read_request(stream.request)
            if isinstance(request, EmbeddingRequest):
                await self._embed(stream, request)
            else:
                await self._generate(stream, request)
        except UnknownAdapter as error:
            self._fail(stream, InvalidArgument(str(error)), "[Error] Unsupported LoRA.")
        except InvalidParameter as error:
            self._fail(stream, InvalidArgument(f"Error generating stream: {tensor_error_text(error)}"))
        except ServerError as error:
            self._fail(stream, type(error)(f"Error generating stream: {error.message}"))
        except Exception as error:
            logger.exception("model '%s' failed", self.context.name, extra=request_fields(stream))
            self._fail(stream, InternalError(f"Error generating stream: {error}"))

    def _handle_unhealthy(self, stream: ResponseStream) -> None:
        """Fail the request and, as in Triton, unload the model if the model control mode allows it."""
        stream.fail(Unavailable(UNHEALTHY))
        self._unhealthy = True
        if self._unloading is None:
            logger.error(
                "model '%s': [vllm] Engine is not healthy and model will be unloaded", self.context.name
            )
            self._unloading = asyncio.get_running_loop().create_task(self._unload_model())

    async def _unload_model(self) -> None:
        try:
            await self.context.core.unload_model(self.context.name)
        except ServerError as error:
            # Not allowed in this model control mode: the model stays loaded, but is not ready.
            logger.error("model '%s' stays loaded: %s", self.context.name, error)

    async def _generate(self, stream: ResponseStream, request: TextRequest) -> None:
        lora = None if request.lora is None else self._adapters.find(request.lora)
        if self._language_model is None:
            raise InvalidArgument(
                f"model '{self.context.name}' is an embedding model; send embedding_request"
            )
        values = parse_sampling_values(request.values, self._sampling_types, self._structured_output_fields)
        params = self.engine.sampling_params(values, stream=request.stream)
        stream.count_sequences(max(params.n, getattr(params, "best_of", None) or 1))
        prompt: dict[str, Any] = {"prompt": request.prompt}
        if request.images:
            prompt[IMAGES] = await asyncio.to_thread(image_data, request.images)
        tensors = ResponseTensors(request, params.n)
        outputs = self.engine.generate(prompt, params, lora=lora, priority=stream.request.priority)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if not stream.timeline.compute_start:
                        stream.timeline.compute_start = time.monotonic_ns()
                    if stream.backlog is not None:
                        await stream.backlog.wait()
                    self._send(stream, tensors.of(output), final=output.finished)
        except asyncio.CancelledError:
            self._log_cancellation(stream)
            raise

    def _log_cancellation(self, stream: ResponseStream) -> None:
        """Log the lines of Triton's backend. The request was aborted in vLLM's engine when its outputs were closed."""
        for line in ("Cancelling the request", "Successfully cancelled the request"):
            logger.info("model '%s': [vllm] %s", self.context.name, line, extra=request_fields(stream))

    async def _embed(self, stream: ResponseStream, request: EmbeddingRequest) -> None:
        if "embed" not in self.engine.tasks:
            raise InvalidArgument(f"model '{self.context.name}' does not support embeddings")
        key = "prompt" if isinstance(request.prompt, str) else "prompt_token_ids"
        output = await self.engine.encode(
            {key: request.prompt},
            library.pooling_params("embed", dimensions=request.dimensions),
            priority=stream.request.priority,
        )
        stream.timeline.compute_start = stream.timeline.compute_start or time.monotonic_ns()
        values = vector_of(output).tolist()
        tensors = embedding_tensors(values, len(output.prompt_token_ids), request.requested)
        self._send(stream, tensors, final=True)

    def _send(self, stream: ResponseStream, tensors: list[Tensor], *, final: bool) -> None:
        context = self.context
        stream.send(InferenceResponse(context.name, context.version, outputs=tensors), final=final)

    def _fail(self, stream: ResponseStream, error: ServerError, text: str = "N/A") -> None:
        """Send an error together with an output, like Triton's backend; some protocols transmit both."""
        context = self.context
        stream.send(
            InferenceResponse(
                context.name,
                context.version,
                outputs=[Tensor.from_strings("text_output", [text])],
                error=error,
            ),
            final=True,
        )
