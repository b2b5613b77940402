"""A loaded model version: checks requests, records statistics and traces, and passes requests to the backend."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from neso.generation import GenerationOutput, GenerationRequest, InvalidParameter, PooledOutput
from neso.server.admission import CLIENT, RESERVATION, Admission
from neso.server.backend import Backend, ModelContext, TextFields
from neso.server.backlog import Backlog
from neso.server.errors import (
    Cancelled,
    ErrorCode,
    InternalError,
    Overloaded,
    ServerError,
    Unavailable,
    Unsupported,
)
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.log import request_fields
from neso.server.metadata import ModelMetadata
from neso.server.metrics.registry import LabelSet
from neso.server.response_cache.cached_model import open_cached_model
from neso.server.schedulers.dynamic_batcher import DynamicBatcher
from neso.server.schedulers.sequence_batcher import SequenceBatcher
from neso.server.signature import Classifier, Signature
from neso.server.statistics import FailureReason, ModelStatistics, ResponseOutcome, Timeline

if TYPE_CHECKING:
    from neso.engine.client.engine_group import EngineGroup
    from neso.generation import LanguageModel, PoolingModel, PoolingRequest
    from neso.server.tracing import TraceParent

logger = logging.getLogger(__name__)

BACKEND_SHARE = 0.2
"""Part of the time to unload a model that is reserved for its backend."""
MIN_UNLOAD_TIME = 1.0
"""Seconds that a backend always has to unload."""


async def unload_backend(backend: Backend, timeout: float | None) -> None:
    """Unload a backend; cancel `Backend.unload` after `timeout` seconds, but not before `MIN_UNLOAD_TIME`."""
    seconds = None if timeout is None else max(timeout, MIN_UNLOAD_TIME)
    try:
        await asyncio.wait_for(backend.unload(), seconds)
    except asyncio.TimeoutError:
        logger.error(
            "model '%s' was not unloaded in time: its processes are killed, its threads go on",
            backend.context.name,
        )


class Model:
    """A loaded model version. All requests (tensors, text generation, pooling) go through `submit`.

    `versions`: the ready versions of the same model, maintained by the lifecycle. After a reload, `submit` forwards
    requests to the successor, so that a frontend can hold a `Model` across an await.
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
        self.signature = Signature(context.config, reshapes=not backend.on_workers)
        self._classifier = Classifier(context.config, context.directory, backend.output_labels)
        self.load_duration: float = 0.0
        self.source: object = None  # lives as long as the model: it can own a temporary folder
        tags = {f"_{key}": value for key, value in self.config.metric_tags.items()}
        if context.namespace:
            tags["namespace"] = context.namespace
        self.metric_labels = LabelSet({"model": self.name, "version": self.version, **tags})
        self._core = context.core
        self._backend = backend
        self._limited = context.limited
        self.admission: Admission = context.core.admission
        self._backlog_limit = context.core.options.max_response_backlog
        self._batcher = self._make_batcher()
        self._executor = self._batcher or backend  # gets the requests with tensors
        self._sequences = self._batcher if isinstance(self._batcher, SequenceBatcher) else None
        self._cached = open_cached_model(context, self._start, self._remove)
        self._in_flight: set[ResponseStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._retired = False
        self._successor: Model | None = None

    @property
    def language_model(self) -> LanguageModel | None:
        """Text-generation interface; None if the model does not generate text."""
        return self._backend.language_model

    @property
    def pooling_model(self) -> PoolingModel | None:
        """Pooling interface (embeddings, scores); None if the model has none."""
        return self._backend.pooling_model

    @property
    def text_inputs(self) -> Mapping[str, type]:
        """See `Backend.text_inputs`."""
        return self._backend.text_inputs

    def read_text_request(self, request: InferenceRequest, values: Mapping[str, Any]) -> TextFields | None:
        """See `Backend.read_text_request`."""
        return self._backend.read_text_request(request, values)

    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        """Classification labels by output."""
        return self._classifier.labels

    @property
    def uses_cache(self) -> bool:
        """Whether responses are cached."""
        return self._cached is not None

    @property
    def passes_references(self) -> bool:
        """Whether inputs and outputs can be references to tensors on workers, which a cache could not read."""
        return self._backend.on_workers and self._cached is None

    @property
    def capacity(self) -> int:
        """See `Backend.capacity`."""
        return self._backend.capacity

    @property
    def max_queue_size(self) -> int | None:
        """See `Backend.max_queue_size`."""
        return self._backend.max_queue_size

    @property
    def engine_group(self) -> EngineGroup | None:
        """See `Backend.engine_group`."""
        return self._backend.engine_group

    @property
    def pending_count(self) -> int:
        """Number of accepted requests whose computation has not started."""
        return sum(1 for stream in tuple(self._in_flight) if not stream.timeline.compute_start)

    @property
    def total_statistics(self) -> ModelStatistics:
        """The statistics of all server processes."""
        elsewhere = self._elsewhere()
        return self.statistics if elsewhere is None else self.statistics.merged(elsewhere[0])

    @property
    def total_pending_count(self) -> int:
        """`pending_count` of all server processes."""
        elsewhere = self._elsewhere()
        return self.pending_count + (0 if elsewhere is None else elsewhere[1])

    def _elsewhere(self) -> tuple[ModelStatistics, int] | None:
        front_ends = self._core.front_ends
        return None if front_ends is None else front_ends.counts(self)

    @property
    def in_flight_count(self) -> int:
        """Number of accepted requests that have not ended."""
        return len(self._in_flight)

    @property
    def forwards_tensors(self) -> bool:
        """Whether front-end processes forward requests with tensors even if they share the model."""
        return self.uses_cache or not self._backend.shares_tensors

    def share(self) -> Any:
        """See `Backend.share`."""
        return self._backend.share()

    async def attach(self, client: int, *arguments: Any) -> Any:
        """See `Backend.attach`."""
        return await self._backend.attach(client, *arguments)

    def detach(self, client: int) -> None:
        """See `Backend.detach`."""
        self._backend.detach(client)

    def ready(self) -> bool:
        """Return whether requests are accepted and the backend can execute them."""
        return not self._retired and self._backend.ready()

    def live(self) -> bool:
        """See `Backend.live`."""
        return self._backend.live()

    async def check_ready(self) -> bool:
        """Like `ready`, but the backend can also run the model's own readiness check."""
        return not self._retired and await self._backend.check_ready()

    def metadata(self) -> ModelMetadata:
        """Return model metadata of the KServe protocol. The platform defaults to the backend's name."""
        return ModelMetadata(
            self.name,
            list(self.versions),
            self.config.platform or self.config.backend,
            self.signature.metadata(self.signature.inputs),
            self.signature.metadata(self.signature.outputs),
        )

    def submit(self, request: InferenceRequest) -> ResponseStream:
        """Start a request. Raises `ServerError` if the model cannot accept it; later errors are sent as responses."""
        if self._retired:
            return self._after_retirement().submit(request)
        payload = request.payload
        if payload is None:
            batch_size, sequences = self.signature.check(request), 1
        else:
            batch_size, sequences = 1, self._check_payload(payload)
        client = CLIENT.get() if request.client is None else request.client
        if (reservation := RESERVATION.get()) is not None and client:
            reservation.take(sequences)
        try:
            ticket = self.admission.admit(client, sequences, request.input_bytes) if client else None
        except Overloaded:
            self.statistics.record_failure(Timeline(), FailureReason.REJECTED)
            raise
        request.model_version = self.version
        backlog = request.backlog
        if backlog is None and (self.decoupled or isinstance(payload, GenerationRequest)):
            backlog = Backlog(self._backlog_limit)
        stream = ResponseStream(request, self._observe, batch_size, backlog)
        if request.trace is not None:
            stream.trace = request.trace.begin(
                self.name, self.version, request.id, stream.timeline.queue_start, request.inputs
            )
        stream.ticket = ticket
        self._in_flight.add(stream)
        self._idle.clear()
        if self._cached is None or payload is not None or not self._cached.take(stream):
            self._start(stream)
        return stream

    async def generate(
        self, request: GenerationRequest, trace: TraceParent | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Submit a text-generation request and yield its outputs. Closing the generator cancels the request.

        Raises `InvalidParameter` if the model does not support the request, and `ServerError`.
        """
        stream = self.submit(self._with_payload(request, trace))
        try:
            async for response in stream:
                response.raise_error(unwrap=True)
                if isinstance(response.result, GenerationOutput):
                    yield response.result
        finally:
            stream.cancel()

    async def pool(self, request: PoolingRequest, trace: TraceParent | None = None) -> PooledOutput:
        """Submit a pooling request and return its result. Raises the same errors as `generate`."""
        stream = self.submit(self._with_payload(request, trace))
        try:
            async for response in stream:
                response.raise_error(unwrap=True)
                if isinstance(response.result, PooledOutput):
                    return response.result
        finally:
            stream.cancel()
        raise InternalError(f"model '{self.name}' returned no result")

    def _with_payload(
        self, payload: GenerationRequest | PoolingRequest, trace: TraceParent | None
    ) -> InferenceRequest:
        return InferenceRequest(
            self.name,
            {},
            id=payload.request_id,
            priority=payload.priority,
            trace=trace,
            payload=payload,
            input_bytes=payload.size,
        )

    def _check_payload(self, payload: GenerationRequest | PoolingRequest) -> int:
        """Check that the model supports the payload, and return its number of sequences. Raises `Unsupported`."""
        if isinstance(payload, GenerationRequest):
            if self.language_model is None:
                raise Unsupported(f"model '{self.name}' is not a language model")
            return payload.sampling.num_sequences
        if self.pooling_model is None:
            raise Unsupported(f"model '{self.name}' does not support embeddings")
        return 1

    def _start(self, stream: ResponseStream) -> None:
        payload = stream.request.payload
        try:
            if payload is None:
                self._executor.submit(stream)
            elif isinstance(payload, GenerationRequest):
                stream.begin_generation(payload)
                self._backend.submit_generation(stream)
            else:
                self._backend.submit_pooling(stream)
        except (ServerError, InvalidParameter) as error:
            stream.fail_with(error)
        except Exception as error:
            logger.exception(
                "backend of model '%s' failed to take a request", self.name, extra=request_fields(stream)
            )
            stream.fail(InternalError(f"backend of model '{self.name}' failed to take the request: {error}"))

    def retire(self, successor: Model | None = None) -> None:
        """Stop accepting requests; forward them to the successor, if any."""
        self._retired = True
        self._successor = successor

    async def drain(self, timeout: float | None) -> bool:
        """Wait until no request is in flight. Returns False after `timeout` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    async def unload(self, timeout: float | None) -> None:
        """Wait for the requests in flight, cancel the rest, and release the backend's resources.

        All of this takes at most `timeout` seconds, of which the backend has what the requests leave, but at least a
        fifth and `MIN_UNLOAD_TIME`. A backend that takes longer is abandoned: its processes are killed, its threads
        go on.
        """
        self._retired = True
        started = time.monotonic()
        patience = None if timeout is None else timeout * (1 - BACKEND_SHARE)
        drained, _ = await asyncio.gather(self.drain(patience), self._retire_elsewhere(patience))
        if not drained:
            for stream in tuple(self._in_flight):
                stream.cancel()
                stream.fail(Unavailable(f"model '{self.name}' is unloaded, the request did not end in time"))
        if self._batcher is not None:
            self._batcher.close()
        if self._cached is not None:
            await self._cached.close()
        await self._backend.request_tasks.end()
        try:
            left = None if timeout is None else timeout - (time.monotonic() - started)
            await unload_backend(self._backend, left)
        finally:
            if self._limited is not None:
                self._limited.close()
        for stream in tuple(self._in_flight):
            stream.fail(Unavailable(f"model '{self.name}' is unloaded"))

    async def _retire_elsewhere(self, timeout: float | None) -> None:
        """Wait for the requests in flight in front-end processes."""
        if self._core.front_ends is not None:
            await self._core.front_ends.retire(self, timeout)

    async def update_instances(self, config: Any) -> bool:
        """Change the number of instances to that of `config`, which has no other changes.

        Returns False if the model must be reloaded instead. If it raises `ServerError`, nothing has changed.
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
            if "dynamic_batching" not in self._backend.implemented_fields:
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
        """Record a response in statistics, trace and cache, and reshape its outputs. Runs before the consumer."""
        if not response.model_name:
            response.model_name, response.model_version = self.name, self.version
        if self._sequences is not None:
            self._sequences.observe(stream, response)
        request = stream.request
        if response.result is not None and isinstance(response.result, GenerationOutput):
            stream.observe_generation(response.result)
        if request.requested_outputs or request.classification or self.signature.reshapes_outputs:
            self._shape_outputs(request, response)
        if self._cached is not None:
            self._cached.observe(request, response)
        if response.error is not None and stream.failure is None:
            stream.failure = _reason(response.error, request)
        if self.decoupled:
            outcome = _outcome(response, request)
            self.statistics.responses.record(stream.timeline, response.created_ns, outcome)
        else:
            self.statistics.responses.record_first(stream.timeline)
        if stream.trace is not None:
            stream.trace.observe(stream.timeline, response, request.inputs)
        if response.final:
            if stream.failure is not None:
                self.statistics.record_failure(stream.timeline, stream.failure)
            else:
                self.statistics.record_success(stream.timeline, stream.batch_size)
                if self._batcher is None and not self._backend.counts_executions:
                    self.statistics.record_execution(stream.batch_size, stream.timeline)
            self._remove(stream)

    def _shape_outputs(self, request: InferenceRequest, response: InferenceResponse) -> None:
        requested = request.requested_outputs
        if requested:
            response.outputs = [tensor for tensor in response.outputs if tensor.name in requested]
        try:
            response.outputs = self.signature.restore(response.outputs)
            if request.classification:
                response.outputs = self._classifier.classify(response.outputs, request.classification)
        except ServerError as error:
            response.outputs, response.error = [], InternalError(error.message)

    def _remove(self, stream: ResponseStream) -> None:
        """Remove a request that has ended."""
        self._in_flight.discard(stream)
        if stream.ticket is not None:
            stream.ticket.release()
        if not self._in_flight:
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
