"""Base class of backends that run Neso's engine."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from neso.backends.llm.cluster_metrics import cluster_metrics
from neso.backends.llm.engine_options import stage_engine_config
from neso.backends.llm.engine_sharing import EngineReconnector, EngineShare
from neso.backends.llm.engine_supervisor import EngineSupervisor
from neso.backends.llm.launched_ranks import claim_launched_ranks, with_launched_ranks
from neso.backends.llm.metrics import LlmMetrics, RequestTimer
from neso.backends.llm.orchestrator_mode import with_own_devices
from neso.backends.llm.submitted_request import SubmittedRequest
from neso.backends.member_metrics import MemberMetrics
from neso.backends.option_files import log_default_sampling
from neso.backends.request_tensors import tensor_error_text
from neso.backends.restarts import restart_counter
from neso.cluster.cluster_engine import ClusterEngine
from neso.engine.client.engine_group import EngineGroup
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineBusy, EngineDead, EngineError
from neso.engine.ipc.messages import EngineInfo
from neso.engine.text.tokenizer import NO_TOKENIZER, EngineTokenizer
from neso.generation import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    LanguageModel,
    LoraRequest,
    PooledOutput,
    PoolingInfo,
    PoolingModel,
    PoolingRequest,
    SamplingDefaults,
)
from neso.server.backend import Backend, ModelContext
from neso.server.config.scheduling import available_gpus
from neso.server.errors import (
    InternalError,
    InvalidArgument,
    NotFound,
    Overloaded,
    Restarting,
    ServerError,
    Unavailable,
)
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.log import request_fields

logger = logging.getLogger(__name__)


class EngineBackend(Backend):
    """Base class of backends that run Neso's engine: life cycle, metrics, text generation, pooling, adapters.

    Subclasses implement `submit` for requests with tensors. `iteration_metrics`: whether the metrics include
    TensorRT-LLM's statistics of iterations.
    """

    iteration_metrics = True

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._config: EngineConfig
        self._engine: EngineGroup | None = None
        self._metrics: LlmMetrics | None = None
        self._workers: ClusterEngine | None = None
        self._cluster_metrics: MemberMetrics[Any, Any] | None = None
        self._supervisor: EngineSupervisor | EngineReconnector | None = None

    @abstractmethod
    def engine_config(self) -> EngineConfig:
        """Return the configuration of the engine. Called in a thread. Raises `InvalidArgument`."""

    async def load(self) -> None:
        context = self.context
        config = await asyncio.to_thread(self.engine_config)
        config = self._config = with_launched_ranks(config, context.name, context.backend_config)
        in_process = context.backend_config.get("in-process", "false").lower() == "true"
        count = len(config.cluster.local_roles) or config.data_parallel_size or self.num_instances
        claim_launched_ranks(context.core.devices, config, context.name, count)
        gpus = [str(gpu) for gpu in available_gpus()]
        share = context.core.options.stage_share
        if share is not None:
            config = stage_engine_config(config)
        workers: ClusterEngine | None = None
        try:
            config = with_own_devices(config, context, self, count, gpus)
            if config.cluster.enabled:
                workers = await ClusterEngine.open(config, gpus)
                engine = EngineGroup([workers], config)
            else:
                engine = await EngineGroup.start(
                    config, count, gpus=gpus, in_process=in_process, share=share or (0, 1)
                )
        except BaseException as error:
            context.core.devices.release(self)
            if isinstance(error, EngineError):
                raise InvalidArgument(str(error)) from None
            raise
        self._engine = engine
        counter = restart_counter(context.metrics)
        self._supervisor = EngineSupervisor(
            *(context.name, engine if workers is None else workers.local, config, counter),
            *(self._on_restarted, context.core.on_lost),
        )
        info = engine.info
        self._metrics = LlmMetrics(context.metrics, engine, iterations=self.iteration_metrics)
        self._workers = workers
        if workers is not None:
            self._cluster_metrics = cluster_metrics(context.metrics, workers.cluster)
        self._log_loaded(info, count)
        if self.language_model is not None:
            log_default_sampling(
                *(context.name, info.default_sampling),
                *(config.generation_config, config.override_generation_config),
            )

    def _log_loaded(self, info: EngineInfo, engines: int = 1) -> None:
        logger.info(
            "model '%s' on %s%s in %.2f s, context %d tokens, KV cache %d blocks of %d tokens (%.0f MiB)",
            *(self.context.name, f"{engines} engines of " if engines > 1 else "", info.runner),
            *(info.load_seconds, info.max_model_len),
            *(info.num_blocks, info.block_size, info.cache_bytes / 2**20),
        )

    async def unload(self) -> None:
        await self.request_tasks.end()
        if self._supervisor is not None:
            await self._supervisor.stop()
        if self._engine is not None:
            await self._engine.stop()
        self.context.core.devices.release(self)
        if self._metrics is not None:
            self._metrics.close()
        if self._cluster_metrics is not None:
            self._cluster_metrics.close()

    def ready(self) -> bool:
        return self._engine is not None and self._engine.alive

    def live(self) -> bool:
        return self._supervisor is None or not self._supervisor.down

    # -- several server processes -------------------------------------------------------------------------------

    def share(self) -> EngineShare | None:
        return EngineShare.of(self.engine, self._config)

    async def attach(self, client: int, number: int, address: str = "") -> tuple[int, str]:
        """Let a front-end process use an engine; see `Attachment`. Raises `Unavailable`."""
        engine = self.engine.engines[number]
        try:
            if address:
                engine.attach(client, address)
            return client, address or engine.client_address()
        except EngineDead as error:
            raise self._server_error(error) from None

    def detach(self, client: int) -> None:
        for engine in self.engine.engines:
            engine.detach(client)

    async def connect(self, share: EngineShare, attach: Callable[..., Any]) -> None:
        context = self.context
        self._config = share.config
        try:
            self._engine = engine = await share.connect(attach)
        except EngineError as error:
            raise Unavailable(str(error)) from None
        self._metrics = LlmMetrics(
            context.metrics, engine, iterations=self.iteration_metrics, counts_steps=False
        )
        self._supervisor = EngineReconnector(engine, self._metrics.replace_engine)

    def _on_restarted(self, info: EngineInfo) -> None:
        assert self._metrics is not None
        self._metrics.replace_engine()
        self._log_loaded(info)

    # -- text generation ----------------------------------------------------------------------------------------

    @property
    def language_model(self) -> LanguageModel | None:
        engine = self._engine
        has_text = engine is not None and engine.info.generates and engine.text is not NO_TOKENIZER
        return self if has_text else None

    @property
    def pooling_model(self) -> PoolingModel | None:
        return self if self.pooling is not None else None

    @property
    def engine(self) -> EngineGroup:
        """The engines of the model. Only available after `load`."""
        assert self._engine is not None, "the model is not loaded"
        return self._engine

    @property
    def engine_group(self) -> EngineGroup:
        return self.engine

    @property
    def capacity(self) -> int:
        return self.engine.info.max_num_seqs

    @property
    def max_queue_size(self) -> int | None:
        return self._config.scheduler.max_queue_size

    @property
    def text(self) -> EngineTokenizer:
        return self.engine.text

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def default_sampling(self) -> SamplingDefaults:
        return self.engine.default_sampling

    def submit_generation(self, stream: ResponseStream) -> None:
        request = stream.request.payload
        assert isinstance(request, GenerationRequest)
        name, version = self.context.name, self.context.version
        messages: list[GenerationOutput] = []

        def deliver(output: GenerationOutput) -> None:
            stream.send(InferenceResponse(name, version, result=output), final=output.finished)

        def deliver_joined(output: GenerationOutput) -> None:
            messages.append(output)
            if output.finished:
                deliver(GenerationOutput.joined(messages))
            else:
                stream.observe_generation(output)

        self.generate_to(stream, request, deliver_joined if stream.request.single_response else deliver)

    def generate_to(
        self, stream: ResponseStream, request: GenerationRequest, deliver: Callable[[GenerationOutput], None]
    ) -> None:
        """Generate text for `stream`. Outputs are passed to `deliver` on the core's loop, errors to the stream.

        The request is aborted when the stream is cancelled or closed.
        """
        assert self._metrics is not None, "the model is not loaded"
        if stream.trace is not None and stream.trace.generation is not None:
            request = dataclasses.replace(request, tracer=stream.trace.generation)
        SubmittedRequest(self, stream, deliver, RequestTimer(self._metrics, request)).submit(request)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        """See `LanguageModel.generate`. Errors of the engine are raised as `ServerError`."""
        assert self._metrics is not None, "the model is not loaded"
        timer = RequestTimer(self._metrics, request)
        reason: FinishReason | None = FinishReason.ABORT
        try:
            async with aclosing(self.engine.generate(request)) as outputs:
                async for output in outputs:
                    timer.observe(output)
                    yield output
        except InvalidParameter:
            reason = None
            raise
        except EngineError as error:
            reason = FinishReason.ERROR
            raise self._server_error(error) from None
        finally:
            timer.end(reason)

    @property
    def accepts_images(self) -> bool:
        """See `neso.generation.SupportsImages`."""
        return self.engine.info.vision is not None

    # -- LoRA adapters: neso.generation.SupportsLora ------------------------------------------------------------

    @property
    def allows_runtime_lora(self) -> bool:
        return self.engine.info.lora.enabled and self.engine.info.lora.allow_runtime_lora

    def list_loras(self) -> dict[str, str | None]:
        return self.engine.list_loras()

    async def load_lora(self, lora: LoraRequest) -> None:
        try:
            await self.engine.load_lora(lora)
        except EngineDead as error:
            raise self._server_error(error) from None
        except EngineError as error:
            raise InvalidArgument(str(error)) from None

    async def unload_lora(self, name: str) -> None:
        try:
            await self.engine.unload_lora(name)
        except EngineDead as error:
            raise self._server_error(error) from None
        except EngineError as error:
            raise NotFound(str(error)) from None

    # -- pooling ------------------------------------------------------------------------------------------------

    @property
    def pooling(self) -> PoolingInfo | None:
        return None if self._engine is None else self._engine.pooling

    def submit_pooling(self, stream: ResponseStream) -> None:
        request, metrics = stream.request.payload, self._metrics
        assert isinstance(request, PoolingRequest) and metrics is not None
        name, version = self.context.name, self.context.version
        started = stream.timeline.compute_start = time.monotonic_ns()

        def deliver(output: PooledOutput) -> None:
            metrics.observe_pooled(output.num_prompt_tokens, (time.monotonic_ns() - started) * 1e-9)
            stream.send(InferenceResponse(name, version, result=output), final=True)

        SubmittedRequest(self, stream, deliver).submit(request)

    async def pool(self, request: PoolingRequest) -> PooledOutput:
        """See `PoolingModel.pool`. Errors of the engine are raised as `ServerError`."""
        assert self._metrics is not None, "the model is not loaded"
        started = time.perf_counter()
        try:
            output = await self.engine.pool(request)
        except EngineError as error:
            raise self._server_error(error) from None
        self._metrics.observe_pooled(output.num_prompt_tokens, time.perf_counter() - started)
        return output

    # -- errors and tasks ---------------------------------------------------------------------------------------

    def run_task(self, stream: ResponseStream, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work`, which processes a tensor request; its exceptions are sent as the response."""
        task = self.request_tasks.start(stream, self._run_work(stream, work))
        # Close `work` if the task was cancelled before it started.
        task.add_done_callback(lambda _: work.close())
        return task

    async def _run_work(self, stream: ResponseStream, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.fail(stream, error)

    def fail(self, stream: ResponseStream, error: Exception) -> None:
        """Close the stream with an error of the engine or the request, or with an unexpected error, which is logged."""
        if isinstance(error, EngineError):
            error = self._server_error(error)
        if isinstance(error, InvalidParameter) and stream.request.payload is None:
            stream.reject(InvalidArgument(tensor_error_text(error)))
        elif isinstance(error, (InvalidParameter, ServerError)):
            stream.fail_with(error)
        else:
            logger.error("model '%s' failed", self.context.name, exc_info=error, extra=request_fields(stream))
            failure = InternalError(f"model '{self.context.name}': {error}")
            failure.__cause__ = error
            stream.fail(failure)

    def _server_error(self, error: EngineError) -> ServerError:
        message = f"model '{self.context.name}': {error}"
        if isinstance(error, EngineDead):
            if self.live():
                return Restarting(f"{message} and is being restarted: retry the request later")
            return Unavailable(f"{message} and is not restarted")
        if not isinstance(error, EngineBusy):
            return InternalError(message)
        overloaded = Overloaded(message)
        if self._workers is not None:
            wait = self._workers.cluster.predicted_wait
            overloaded.retry_after = max(overloaded.retry_after, math.ceil(wait))
        return overloaded
