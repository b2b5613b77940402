"""Engine core for encoders: computes embeddings or scores, one batch of requests per step."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from neso.engine.core.admission import QueueFull, WaitingQueue
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.core.sequence import Sequence
from neso.engine.core.stats import EngineStats
from neso.engine.encoders.text_encoder import TextBatch, TextEncoder
from neso.engine.pooling.pooler import PooledSoFar, Pooler
from neso.generation.output import FinishReason
from neso.generation.pooling import PoolingInfo, PoolingTask

logger = logging.getLogger(__name__)

Float32Array = npt.NDArray[np.float32]


class EncoderCore:
    """The counterpart of `EngineCore` for encoders: single-threaded, no I/O.

    A request is completed in one step, so there is no KV cache and no preemption. A step takes requests by priority and
    arrival up to `max_num_batched_tokens` and `max_num_seqs`. Texts are not split, so a long one may exceed the token
    budget in a separate step.
    """

    def __init__(self, encoder: TextEncoder, pooler: Pooler, config: SchedulerConfig) -> None:
        self._encoder, self._pooler, self._config = encoder, pooler, config
        self._waiting = WaitingQueue(config.max_queue_size, config.priority_ageing_seconds)
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._step = 0
        self._num_tokens = 0
        self.lost_device = False
        """Whether no further step can run in this process, after a failed one."""

    @property
    def info(self) -> PoolingInfo:
        """Supported pooling tasks."""
        classifier = self._encoder.classifier
        tasks: set[PoolingTask] = {"embed"} if classifier is None else {"embed", "classify"}
        return PoolingInfo(
            tasks=frozenset(tasks),
            dimensions=self._pooler.dimensions(self._encoder.spec.hidden_size),
            kind=self._pooler.kind,
            labels=[] if classifier is None else list(classifier.spec.labels),
        )

    @property
    def has_work(self) -> bool:
        return len(self._waiting) > 0

    def add(self, request: EngineRequest) -> list[SequenceOutput]:
        """Queue a request. Returns an error output at once if the request can never run."""
        if request.pooling is None:
            return [_failed(request, "the model is an encoder: it cannot generate text")]
        if request.request_id in self._sequences:
            return [_failed(request, f"request id '{request.request_id}' is in use")]
        try:
            self._waiting.check_room()
        except QueueFull as full:
            return [_failed(request, str(full), refused=True)]
        self._arrivals += 1
        rank = self._waiting.rank(request.priority, request.queue_delay)
        sequence = Sequence(id=self._arrivals, request=request, arrival=self._arrivals, rank=rank)
        self._sequences[request.request_id] = sequence
        self._waiting.add(sequence)
        return []

    def request_ids(self) -> list[str]:
        """Return the ids of the requests in flight."""
        return list(self._sequences)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request; unknown ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._waiting.remove(sequence)

    def step(self) -> list[SequenceOutput]:
        """Encode the next requests. Errors become failed outputs; never raises."""
        batch = self._next_batch()
        if not batch:
            return []
        self._step += 1
        try:
            vectors = self._run(batch)
        except Exception as error:
            logger.error("step %d failed", self._step, exc_info=error)
            self.lost_device = self._encoder.layers.has_lost_device()
            return [_failed(request, f"the model failed: {error}") for request in batch]
        return [_answer(request, vector) for request, vector in zip(batch, vectors, strict=True)]

    def stats(self) -> EngineStats:
        waiting = len(self._waiting)
        return EngineStats(
            step=self._step, num_requests=waiting, num_waiting=waiting, num_batched_tokens=self._num_tokens
        )

    def check_integrity(self) -> None:
        """Do nothing: there is no KV cache to check."""

    def _next_batch(self) -> list[EngineRequest]:
        budget, batch = self._config.max_num_batched_tokens, list[EngineRequest]()
        while self._waiting and len(batch) < self._config.max_num_seqs:
            sequence = self._waiting[0]
            budget -= len(sequence.request.prompt_token_ids)
            if budget < 0 and batch:
                break
            self.abort(sequence.request.request_id)
            batch.append(sequence.request)
        return batch

    def _run(self, requests: list[EngineRequest]) -> list[Float32Array]:
        batch = TextBatch.of(
            [(request.prompt_token_ids, request.token_type_ids or None) for request in requests]
        )
        self._num_tokens = len(batch.token_ids)
        hidden = self._encoder.encode(batch)
        vectors: list[Float32Array] = []
        for request, start, end in zip(requests, batch.starts, batch.starts[1:], strict=False):
            params = request.pooling
            assert params is not None
            if params.task == "classify":
                vectors.append(self._classify(hidden[start:end], params.activation))
                continue
            pooled = PooledSoFar(self._pooler.kind_for(params))
            pooled.add(hidden[start:end])
            vectors.append(self._pooler.finish(pooled.vector(), params))
        return vectors

    def _classify(self, hidden: Float32Array, activation: bool) -> Float32Array:
        classifier = self._encoder.classifier
        if classifier is None:
            raise ValueError("the model has no classifier")
        logits = classifier.logits(hidden)
        return classifier.activate(logits) if activation else logits


def _answer(request: EngineRequest, vector: Float32Array) -> SequenceOutput:
    if not np.isfinite(vector).all():
        return _failed(request, "the model gave values that are not numbers")
    return SequenceOutput(
        request_id=request.request_id,
        index=0,
        token_ids=[],
        finish_reason=FinishReason.STOP,
        pooled=vector.astype(np.float32).tobytes(),
    )


def _failed(request: EngineRequest, message: str, *, refused: bool = False) -> SequenceOutput:
    return SequenceOutput.failed(request.request_id, 0, message, refused=refused)
