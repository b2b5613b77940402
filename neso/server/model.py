"""One version of a model: takes requests, checks them, counts them, and hands them to the backend."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from neso.generation import InvalidParameter
from neso.server.backend import Backend, ModelContext
from neso.server.errors import (
    Cancelled,
    ErrorCode,
    InternalError,
    InvalidArgument,
    ServerError,
    Unavailable,
    Unsupported,
)
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.log import request_fields
from neso.server.metadata import ModelMetadata
from neso.server.metrics.text import LabelSet
from neso.server.response_cache.cached_model import open_cached_model
from neso.server.schedulers.dynamic_batcher import DynamicBatcher
from neso.server.schedulers.sequence_batcher import SequenceBatcher
from neso.server.signature import Classifier, Signature
from neso.server.statistics import FailureReason, ModelStatistics, ResponseOutcome, Timeline

if TYPE_CHECKING:
    from neso.generation import (
        GenerationOutput,
        GenerationRequest,
        LanguageModel,
        PooledOutput,
        PoolingModel,
        PoolingRequest,
    )
    from neso.server.inference_request import InferenceRequest
    from neso.server.tracing import TraceParent

logger = logging.getLogger(__name__)


class Model:
    """A loaded version. `versions` are those of the model's name that are ready, kept by the lifecycle.

    When a reload has replaced this version, `submit` passes requests on to its successor, so that a front end
    may hold a `Model` across an await.
    """

    def __init__(self, context: ModelContext, backend: Backend) -> None:
        self.name = context.name
        self.version = context.version
        self.directory = context.directory
        self.version_directory = context.version_directory
        self.versions = [context.version]
        self.config: Any = context.config
        self.decoupled = bool(context.config.model_transaction_policy.decoupled)
        self.statistics: ModelStatistics = context.statistics
        self.signature = Signature(context.config)
        self._classifier = Classifier(context.config, context.directory)
        self.load_duration: float = 0.0
        self.source: object = None  # kept alive as long as the model: it may own a temporary folder
        tags = {f"_{key}": value for key, value in self.config.metric_tags.items()}
        self.metric_labels = LabelSet({"model": self.name, "version": self.version, **tags})
        self._backend = backend
        self._limited = context.limited
        self._batcher = self._make_batcher()
        self._sequences = self._batcher if isinstance(self._batcher, SequenceBatcher) else None
        self._cached = open_cached_model(context, self._start, self._left)
        self._in_flight: set[ResponseStream] = set()
        self._generating = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._retired = False
        self._successor: Model | None = None

    @property
    def language_model(self) -> LanguageModel | None:
        """The model's text face, if it has one."""
        return self._backend.language_model

    @property
    def pooling_model(self) -> PoolingModel | None:
        """The model's face for vectors, if it has one."""
        return self._backend.pooling_model

    @property
    def uses_cache(self) -> bool:
        """Whether responses are cached."""
        return self._cached is not None

    @property
    def pending_count(self) -> int:
        """Requests that were accepted and are not being computed yet."""
        return sum(1 for stream in tuple(self._in_flight) if not stream.timeline.compute_start)

    @property
    def in_flight_count(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._in_flight) + self._generating

    def ready(self) -> bool:
        """Whether requests are accepted and the backend can execute them."""
        return not self._retired and self._backend.ready()

    async def check_ready(self) -> bool:
        """The same, and what the model itself says of that, if it can be asked."""
        return not self._retired and await self._backend.check_ready()

    def metadata(self) -> ModelMetadata:
        """What clients are told. The platform of a backend without one is the backend's name."""
        return ModelMetadata(
            self.name,
            list(self.versions),
            self.config.platform or self.config.backend,
            self.signature.metadata(self.signature.inputs),
            self.signature.metadata(self.signature.outputs),
        )

    def submit(self, request: InferenceRequest) -> ResponseStream:
        """Start a request. Raises `InvalidArgument` if it does not fit; later errors come as responses."""
        if self._retired:
            return self._after_retirement().submit(request)
        batch_size = self.signature.check(request)
        request.model_version = self.version
        stream = ResponseStream(request, self._observe, batch_size)
        if request.trace is not None:
            stream.trace = request.trace.begin(
                self.name, self.version, request.id, stream.timeline.queue_start, request.inputs
            )
        self._in_flight.add(stream)
        self._idle.clear()
        if self._cached is None or not self._cached.take(stream):
            self._start(stream)
        return stream

    def _start(self, stream: ResponseStream) -> None:
        try:
            if self._batcher is not None:
                self._batcher.submit(stream)
            else:
                self._backend.submit(stream)
        except ServerError as error:
            stream.fail(error)
        except Exception as error:
            logger.exception(
                "backend of model '%s' failed to take a request", self.name, extra=request_fields(stream)
            )
            stream.fail(InternalError(f"backend of model '{self.name}' failed to take the request: {error}"))

    async def generate(
        self, request: GenerationRequest, trace: TraceParent | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Generate text. Raises `Unsupported` without a language model, and what that one raises."""
        if self._retired:
            async with aclosing(self._after_retirement().generate(request, trace)) as outputs:
                async for output in outputs:
                    yield output
            return
        language_model = self.language_model
        if language_model is None:
            raise Unsupported(f"model '{self.name}' is not a language model")
        timeline = Timeline()
        traced = None
        if trace is not None:
            traced = trace.begin(self.name, self.version, request.request_id, timeline.queue_start)
        following = traced.begin_generation(request) if traced is not None else None
        failure: FailureReason | None = FailureReason.CANCELED
        begun = False
        error: ServerError | None = Cancelled("the request was cancelled")
        self._generating += 1
        self._idle.clear()
        try:
            # Closing this generator must close the inner one at once: that is what frees the request's blocks.
            async with aclosing(language_model.generate(request)) as outputs:
                async for output in outputs:
                    if not begun:
                        begun = True
                        self.statistics.responses.record_first(timeline, time.monotonic_ns())
                    if not timeline.compute_start:
                        timeline.compute_start = output.scheduled_ns
                    if following is not None:
                        following.observe(output)
                    if output.finished:
                        failure = error = None
                    yield output
            failure = error = None
        except InvalidParameter as refusal:
            failure, error = FailureReason.REJECTED, InvalidArgument(str(refusal))
            raise
        except Exception as fault:
            failure = FailureReason.BACKEND
            error = fault if isinstance(fault, ServerError) else InternalError(str(fault))
            raise
        finally:
            self._generating -= 1
            if traced is not None:
                traced.end(timeline, error)
            self._count(timeline, 1, failure)

    async def pool(self, request: PoolingRequest) -> PooledOutput:
        """One vector. Raises `Unsupported` without a model that gives them, and what that one raises."""
        if self._retired:
            return await self._after_retirement().pool(request)
        pooling_model = self.pooling_model
        if pooling_model is None:
            raise Unsupported(f"model '{self.name}' gives no vectors")
        timeline = Timeline()
        failure: FailureReason | None = FailureReason.CANCELED
        self._generating += 1
        self._idle.clear()
        try:
            output = await pooling_model.pool(request)
            failure = None
            return output
        except InvalidParameter:
            failure = FailureReason.REJECTED
            raise
        except Exception:
            failure = FailureReason.BACKEND
            raise
        finally:
            self._generating -= 1
            self._count(timeline, 1, failure)

    def retire(self, successor: Model | None = None) -> None:
        """Accept no more requests; pass them to the successor if there is one."""
        self._retired = True
        self._successor = successor

    async def drain(self, timeout: float | None) -> bool:
        """Wait until no request is in flight; False when that takes longer than `timeout` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    async def unload(self, timeout: float | None) -> None:
        """End the requests in flight, by force after `timeout`, and give back what the backend holds."""
        self._retired = True
        if not await self.drain(timeout):
            for stream in tuple(self._in_flight):
                stream.cancel()
                stream.fail(Unavailable(f"model '{self.name}' is unloaded, the request did not end in time"))
        if self._batcher is not None:
            self._batcher.close()
        if self._cached is not None:
            await self._cached.close()
        try:
            await self._backend.unload()
        finally:
            if self._limited is not None:
                self._limited.close()
        for stream in tuple(self._in_flight):
            stream.fail(Unavailable(f"model '{self.name}' is unloaded"))

    async def update_instances(self, config: Any) -> bool:
        """Run as many instances as another configuration says, which differs in nothing else.

        False where the model must be loaded again for that. Raises `ServerError`; nothing has changed then.
        """
        if list(config.instance_group) == list(self.config.instance_group):
            return True
        if isinstance(self._batcher, SequenceBatcher) or self._limited is not None:
            return False
        before = self._backend.num_instances
        if not await self._backend.update_instances(config):
            return False
        if self._batcher is not None:
            self._batcher.add_instances(self._backend.num_instances - before)
        return True

    def _make_batcher(self) -> DynamicBatcher | SequenceBatcher | None:
        if self.config.HasField("sequence_batching"):
            return self._make_sequence_batcher()
        batched = self.config.HasField("dynamic_batching") and self.config.max_batch_size
        if not batched and self._limited is None:
            return None
        if not self._backend.batches:
            if "dynamic_batching" not in self._backend.heeds:
                logger.warning(
                    "model '%s': its backend batches by itself or not at all, dynamic_batching has no effect",
                    self.name,
                )
            return None
        return DynamicBatcher(
            self.config, self.signature, self._backend.execute, self._backend.num_instances, self._limited
        )

    def _make_sequence_batcher(self) -> SequenceBatcher:
        backend = self._backend
        if not backend.batches:
            raise Unsupported(
                f"sequence batching is not supported by backend '{self.config.backend}', for {self.name}"
            )
        batcher = SequenceBatcher(
            self.config,
            self.signature,
            backend.execute,
            backend.num_instances,
            backend.context.directory,
            self._limited,
            backend.concatenates,
        )
        backend.on_reschedule = batcher.reschedule
        return batcher

    def _after_retirement(self) -> Model:
        if self._successor is None:
            raise Unavailable(f"Request for unknown model: '{self.name}' has no available versions")
        return self._successor

    def _observe(self, stream: ResponseStream, response: InferenceResponse) -> None:
        """Every response passes here on its way to the consumer."""
        if not response.model_name:
            response.model_name, response.model_version = self.name, self.version
        if self._sequences is not None:
            self._sequences.observe(stream, response)
        request = stream.request
        if request.requested_outputs or request.classification or self.signature.reshapes_outputs:
            self._shape_outputs(request, response)
        if self._cached is not None:
            self._cached.observe(stream.request, response)
        if response.error is not None and stream.failure is None:
            stream.failure = _reason(response.error, stream.request)
        if self.decoupled:
            outcome = _outcome(response, stream.request)
            self.statistics.responses.record(stream.timeline, response.made, outcome)
        if stream.trace is not None:
            stream.trace.observe(stream.timeline, response, stream.request.inputs)
        if response.final:
            self._in_flight.discard(stream)
            self._count(stream.timeline, stream.batch_size, stream.failure)

    def _shape_outputs(self, request: InferenceRequest, response: InferenceResponse) -> None:
        wanted = request.requested_outputs
        if wanted:
            response.outputs = [tensor for tensor in response.outputs if tensor.name in wanted]
        try:
            response.outputs = self.signature.restore(response.outputs)
            if request.classification:
                response.outputs = self._classifier.classify(response.outputs, request.classification)
        except ServerError as error:
            response.outputs, response.error = [], InternalError(error.message)

    def _count(self, timeline: Timeline, batch_size: int, failure: FailureReason | None) -> None:
        if failure is None:
            self.statistics.record_success(timeline, batch_size)
            if self._batcher is None and not self._backend.counts_executions:
                self.statistics.record_execution(batch_size, timeline)
        else:
            self.statistics.record_failure(timeline, failure)
        self._rest_if_idle()

    def _left(self, stream: ResponseStream) -> None:
        """A request was answered without the backend."""
        self._in_flight.discard(stream)
        self._rest_if_idle()

    def _rest_if_idle(self) -> None:
        if not self._in_flight and not self._generating:
            self._idle.set()


def _outcome(response: InferenceResponse, request: InferenceRequest) -> ResponseOutcome:
    if response.error is None:
        return ResponseOutcome.EMPTY_RESPONSE if response.flag_only else ResponseOutcome.SUCCESS
    canceled = _reason(response.error, request) is FailureReason.CANCELED
    return ResponseOutcome.CANCEL if canceled else ResponseOutcome.FAIL


def _reason(error: ServerError, request: InferenceRequest) -> FailureReason:
    if isinstance(error, Cancelled) or error.code is ErrorCode.CANCELLED or request.cancelled:
        return FailureReason.CANCELED
    return FailureReason.BACKEND
