"""Sequence batching: the requests of a sequence are executed by the same instance, one at a time and in order.

A sequence starts with START and holds a slot of an instance until its END is executed, or until it has been idle for
`max_sequence_idle_microseconds`. Sequences without a slot wait in a backlog, at most until a request times out. A
batch has at most one request of a sequence. Driven by arriving requests, ends of executions and requests, and one
timer.

An iterative sequence is a single request that the backend executes repeatedly, each time in a new batch, until its
final response.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from neso.server.errors import Cancelled, InvalidArgument, Unavailable
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import NEVER_EXECUTED, InferenceResponse, ResponseStream
from neso.server.rate_limiter.limiter import LimitedInstances
from neso.server.schedulers.dynamic_batcher import NO_BATCH, BatchChoice, Dispatcher, ResponseOrder
from neso.server.schedulers.sequence_inputs import ControlInputs, SequenceStates
from neso.server.schedulers.sequence_slots import Sequence, SequenceSlots, Strategy
from neso.server.signature import Shape, Signature
from neso.server.tensor import Tensor

logger = logging.getLogger(__name__)

DEFAULT_IDLE_US = 1_000_000

ExecuteOn = Callable[[list[ResponseStream], Callable[[], None], int], None]
"""execute(batch, done, instance): start on an instance; `done` is called on the loop when it is free again."""


class SequenceBatcher:
    """Sequence batcher of a model. Used on the core's loop. Raises `InvalidArgument` for missing initial states."""

    def __init__(
        self,
        config: Any,
        signature: Signature,
        execute: ExecuteOn,
        num_instances: int,
        directory: Path,
        limited: LimitedInstances | None = None,
        concatenates: bool = False,
    ) -> None:
        batching = config.sequence_batching
        self._model: str = config.name
        self._strategy = Strategy.of(config, signature)
        self._controls = ControlInputs(config)
        self._states = SequenceStates(config, directory)
        self._same_shapes = concatenates and self._states.vary
        self._execute = execute
        self._idle_ns = 1000 * (batching.max_sequence_idle_microseconds or DEFAULT_IDLE_US)
        self._order = ResponseOrder() if batching.oldest.preserve_ordering else None
        self._slots = SequenceSlots(num_instances, self._strategy.slots)
        self._busy = [False] * num_instances
        self._sequences: dict[int | str, Sequence] = {}
        self._idle: dict[Sequence, int] = {}  # with their deadlines, in ascending order
        self._expiring: dict[
            Sequence, None
        ] = {}  # ordered set; in the backlog, or were when a request was added
        self._running: dict[ResponseStream, Sequence] = {}
        self._fills_slots = self._controls.has_ready_input and not batching.HasField("oldest")
        self._iterative_ids = count(1) if batching.iterative_sequence else None
        self._dispatcher = Dispatcher(self._dispatch)
        self._limited = limited
        if limited is not None:
            limited.on_grant = self._dispatcher.wake
            limited.on_release = self._dispatcher.dispatch_now

    def submit(self, stream: ResponseStream) -> None:
        """Queue a request, or reject it."""
        if self._iterative_ids is not None and not stream.request.sequence_id:
            self._begin_iterative(stream.request, self._iterative_ids)
        try:
            sequence = self._sequence_of(stream)
        except InvalidArgument as error:
            stream.reject(error)
            return
        if self._order is not None:
            self._order.add(stream)
        stream.on_close = partial(self._closed, stream, sequence, stream.on_close)
        sequence.ended = stream.request.sequence_end
        sequence.waiting.append(stream)
        self._note_timeout(sequence, stream)
        self._idle.pop(sequence, None)
        if self._iterative_ids is not None:
            sequence.ended = True
        stream.request.on_cancel(partial(self._cancel_waiting, stream, sequence))
        self._dispatcher.wake()

    def observe(self, stream: ResponseStream, response: InferenceResponse) -> None:
        """Store the states in a response, before the client receives it."""
        sequence = self._running.get(stream)
        if sequence is None:
            return
        if response.error is None:
            self._states.take(sequence.states, response)
        if response.final and sequence.started:
            # The queue time ends at the first of several executions.
            stream.timeline.compute_start = stream.timeline.input_end = sequence.started

    def reschedule(self, stream: ResponseStream) -> None:
        """Execute a request of an iterative sequence again in a later batch. Called by the backend."""
        sequence = self._running.get(stream)
        if sequence is None:
            stream.finish()  # a warmup request, which does not belong to a sequence
        elif not stream.closed:
            sequence.again = True
            if sequence.executed:
                self._requeue(sequence, stream)

    def close(self) -> list[ResponseStream]:
        """Stop and return the requests that were not executed."""
        self._dispatcher.stop()
        if self._limited is not None:
            self._limited.cancel_all()
        left = [stream for sequence in self._sequences.values() for stream in sequence.waiting]
        for stream in left:
            stream.on_close = None
        self._sequences.clear()
        return [stream for stream in left if not stream.closed]

    def _sequence_of(self, stream: ResponseStream) -> Sequence:
        """Return the sequence of the request; create it for START. Raises `InvalidArgument`."""
        request = stream.request
        if not request.sequence_id:
            raise InvalidArgument(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID"
            )
        if stream.batch_size > 1:
            raise InvalidArgument(
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of "
                "sequence batcher"
            )
        self._controls.check(request)
        sequence = self._sequences.get(request.sequence_id)
        if not request.sequence_start:
            if sequence is None or sequence.ended:
                raise self._has_not_begun(request)
            return sequence
        if sequence is None:
            sequence = self._sequences[request.sequence_id] = Sequence(request.sequence_id)
            self._slots.enter(sequence)
        elif not sequence.ended:
            logger.warning(
                "sequence %s for model '%s' has a conflict. The previous sequence did not end before this sequence "
                "start. Previous sequence will be terminated early.",
                sequence.id,
                self._model,
            )
        return sequence

    def _has_not_begun(self, request: InferenceRequest) -> InvalidArgument:
        return InvalidArgument(
            f"inference request for sequence {request.sequence_id} to model '{self._model}' must specify the "
            "START flag on the first request of the sequence"
        )

    def _dispatch(self) -> None:
        self._forget_idle()
        times: list[int | None] = [self._reject_expired()]
        for instance in range(len(self._slots)):
            choice = self._choose(instance)
            if self._may_begin(instance, choice.batch):
                self._send(choice.batch, instance)
            times.append(choice.until)
        times.append(next(iter(self._idle.values()), None))  # next idle timeout
        self._dispatcher.wake_at(times)

    def _choose(self, instance: int) -> BatchChoice:
        if self._busy[instance]:
            return NO_BATCH
        ready = [
            stream for sequence in self._slots.holders(instance) if (stream := sequence.next) is not None
        ]
        if not ready:
            return NO_BATCH
        ready.sort(key=lambda stream: stream.timeline.queue_start)
        if self._same_shapes:
            shapes = [self._shapes(stream) for stream in ready]
            ready = [
                stream for stream, of_stream in zip(ready, shapes, strict=True) if of_stream == shapes[0]
            ]
        return self._strategy.choose(ready)

    def _shapes(self, stream: ResponseStream) -> list[Shape]:
        """Return the shapes of the request's states."""
        request = stream.request
        begins, sequence = request.sequence_start, self._sequences[request.sequence_id]
        return [state.shape for state in (self._states.initial() if begins else sequence.states).values()]

    def _may_begin(self, instance: int, batch: list[ResponseStream]) -> bool:
        if self._limited is None:
            return bool(batch)
        if batch:
            return self._limited.acquire(instance)  # if False, wait for `on_grant`
        self._limited.cancel(instance)
        return False

    def _send(self, batch: list[ResponseStream], instance: int) -> None:
        for stream in batch:
            sequence = self._sequences[stream.request.sequence_id]
            sequence.waiting.popleft()
            sequence.running, sequence.executed = stream, False
            self._running[stream] = sequence
            if stream.request.sequence_start:
                sequence.begun = True
                sequence.states = self._states.initial()
            self._controls.give(stream.request)
            self._states.give(sequence.states, stream.request)
        self._busy[instance] = True
        whole = self._with_empty_slots(batch) if self._fills_slots else batch
        self._execute(whole, partial(self._executed, batch, instance), instance)

    def _with_empty_slots(self, batch: list[ResponseStream]) -> list[ResponseStream]:
        """Return the batch with each request at its slot's index, and padding requests in lower empty slots."""
        by_slot = {self._running[stream].slot or 0: stream for stream in batch}
        return [by_slot.get(slot) or self._empty_slot(batch[0].request) for slot in range(max(by_slot) + 1)]

    def _empty_slot(self, like: InferenceRequest) -> ResponseStream:
        """Create a padding request: zeros, without a consumer."""
        inputs = {name: Tensor.zeros(name, t.datatype, t.shape) for name, t in like.inputs.items()}
        request = InferenceRequest(self._model, inputs, like.model_version)
        self._controls.give_empty(request)
        return ResponseStream(request)

    def _executed(self, batch: list[ResponseStream], instance: int) -> None:
        """Handle the end of an execution. Sequences continue when their request has its final response."""
        self._busy[instance] = False
        if self._limited is not None:
            self._limited.release(instance)
        for stream in batch:
            sequence = self._running[stream]
            sequence.executed = True
            if stream.closed:
                self._end_request(sequence, stream)
            elif sequence.again:
                self._requeue(sequence, stream)
        self._dispatcher.wake()

    def _closed(
        self, stream: ResponseStream, sequence: Sequence, before: Callable[[], None] | None = None
    ) -> None:
        """Handle a closed request: closed while waiting, during its execution, or after it."""
        if before is not None:
            before()
        if sequence.running is stream:
            if sequence.executed:
                self._end_request(sequence, stream)
        elif sequence.running is None:
            self._advance(sequence)
        self._dispatcher.wake()

    def _cancel_waiting(self, stream: ResponseStream, sequence: Sequence) -> None:
        """Cancel a waiting request and all waiting requests of its sequence, which ends. The backend cancels others."""
        if stream not in sequence.waiting:
            return
        last = sequence.waiting[-1]
        cancelled = sequence.take_requests_with(stream)
        if cancelled[-1] is last:
            sequence.ended = True
        sequence.expires = None
        for left in sequence.waiting:
            self._note_timeout(sequence, left)
        if cancelled[0].request.sequence_start:
            ended = False
        elif sequence.running is not None:
            sequence.running.request.sequence_end, ended = True, False
        else:
            sequence.begun, ended = False, True
        if sequence.running is None:
            self._advance(sequence, ended)
        for request in cancelled:
            request.fail(Cancelled(NEVER_EXECUTED))

    def _end_request(self, sequence: Sequence, stream: ResponseStream) -> None:
        sequence.running, sequence.again, sequence.started = None, False, 0
        del self._running[stream]
        ended = self._ends(stream)
        if ended:
            sequence.begun = False
        self._advance(sequence, ended)

    def _advance(self, sequence: Sequence, ended: bool = False) -> None:
        """Continue a sequence without a running request: drop unexecutable requests, then run, idle or end it.

        `ended`: whether the sequence has just ended.
        """
        orphans = []
        while sequence.waiting:
            stream = sequence.waiting[0]
            if not stream.closed and (sequence.begun or stream.request.sequence_start):
                break
            sequence.waiting.popleft()
            if self._ends(stream):
                sequence.begun, ended = False, True
            if not stream.closed:
                orphans.append(stream)
        if sequence.waiting:
            if ended and sequence.instance is not None:
                # The id starts a new sequence, at the end of the backlog.
                self._slots.leave(sequence)
                self._slots.enter(sequence)
                for stream in sequence.waiting:
                    self._note_timeout(sequence, stream)
        elif sequence.begun:
            self._idle[sequence] = time.monotonic_ns() + self._idle_ns
        else:
            self._forget(sequence)
        for stream in orphans:  # their START was cancelled
            stream.reject(self._has_not_begun(stream.request))

    def _forget(self, sequence: Sequence) -> None:
        self._idle.pop(sequence, None)
        if self._sequences.get(sequence.id) is sequence:
            del self._sequences[sequence.id]
        self._slots.leave(sequence)

    def _forget_idle(self) -> None:
        now = time.monotonic_ns()
        while self._idle:
            sequence, end = next(iter(self._idle.items()))
            if end > now:
                return
            logger.debug("sequence %s of model '%s' was idle too long", sequence.id, self._model)
            self._forget(sequence)

    def _note_timeout(self, sequence: Sequence, stream: ResponseStream) -> None:
        if sequence.instance is None and stream.request.timeout_us:
            expires = stream.timeline.queue_start + 1000 * stream.request.timeout_us
            sequence.expires = expires if sequence.expires is None else min(sequence.expires, expires)
            self._expiring[sequence] = None

    def _reject_expired(self) -> int | None:
        """Reject all requests of sequences that have timed out in the backlog. Returns the time of the next timeout."""
        now = time.monotonic_ns()
        for sequence in tuple(self._expiring):
            if sequence.instance is not None or not sequence.waiting or sequence.expires is None:
                del self._expiring[sequence]
                sequence.expires = None
            elif sequence.expires <= now:
                del self._expiring[sequence]
                sequence.expires = None
                rejected = sequence.take_first_sequence()
                for stream in sequence.waiting:
                    self._note_timeout(sequence, stream)
                for stream in rejected:
                    stream.reject(Unavailable("timeout of the corresponding sequence has been expired"))
        return min((sequence.expires for sequence in self._expiring if sequence.expires), default=None)

    def _ends(self, stream: ResponseStream) -> bool:
        """Return whether the sequence ends with this request, or never started because its START was not executed."""
        request = stream.request
        return (
            request.sequence_end
            or (request.sequence_start and not stream.timeline.compute_start)
            or self._iterative_ids is not None
        )

    # -- iterative sequences ------------------------------------------------------------------------------------

    def _begin_iterative(self, request: InferenceRequest, ids: Iterator[int]) -> None:
        """Assign a new sequence to a request without a sequence id."""
        request.sequence_id = next(number for number in ids if number not in self._sequences)
        request.sequence_start = True

    def _requeue(self, sequence: Sequence, stream: ResponseStream) -> None:
        sequence.running, sequence.again = None, False
        del self._running[stream]
        sequence.started = sequence.started or stream.timeline.compute_start
        stream.request.sequence_start = stream.request.sequence_end = False  # only for the first execution
        sequence.waiting.appendleft(stream)
        if stream.request.cancelled:
            self._cancel_waiting(stream, sequence)
        self._dispatcher.wake()
