"""Execution of batches in instance threads."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from neso.backends.tensor.model import Arrays, TensorModel
from neso.server.backend import ModelContext
from neso.server.errors import Cancelled, InternalError, InvalidArgument, ServerError
from neso.server.inference_response import NEVER_EXECUTED, InferenceResponse, ResponseStream
from neso.server.schedulers.batch import Batch
from neso.server.signature import Signature
from neso.server.statistics import Timeline
from neso.server.tensor import DataType

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Responses to a batch, each with its response stream.

    `size` and `timeline`: batch size and times of a successful execution; 0 and None otherwise.
    """

    responses: list[tuple[ResponseStream, InferenceResponse]]
    size: int = 0
    timeline: Timeline | None = None


class Executor:
    """Executes batches of one model. Shared by the threads of its instances."""

    def __init__(self, context: ModelContext) -> None:
        self._name, self._version = context.name, context.version
        self._config = context.config
        self._signature = Signature(context.config)
        # Outputs that the model must return: configured outputs and implicit states.
        self._datatypes = {spec.name: spec.datatype for spec in self._signature.outputs.values()}
        for state in context.config.sequence_batching.state:
            self._datatypes[state.output_name] = DataType.of_message(state)

    def execute(self, model: TensorModel, streams: list[ResponseStream]) -> Outcome:
        """Execute the requests that are not cancelled. Does not raise."""
        active = [stream for stream in streams if not stream.request.cancelled]
        responses = self._fail(
            [stream for stream in streams if stream.request.cancelled], Cancelled(NEVER_EXECUTED)
        )
        if not active:
            return Outcome(responses)
        started = time.monotonic_ns()
        for stream in active:
            stream.timeline.compute_start = started
        try:
            batch = Batch.collect(active, self._signature, self._config)
            input_end = time.monotonic_ns()
            outputs = model.run(batch.inputs)
            output_start = time.monotonic_ns()
            parts = batch.scatter(self._checked(outputs))
        except BaseException as error:  # also SystemExit: a model must not end the instance thread
            return Outcome(responses + self._fail(active, self._server_error(error, model)))
        for stream, tensors in zip(active, parts, strict=True):
            stream.timeline.input_end = input_end
            stream.timeline.output_start = output_start
            response = InferenceResponse(self._name, self._version, outputs=tensors, final=True)
            responses.append((stream, response))
        return Outcome(responses, batch.size, active[0].timeline)

    def _checked(self, outputs: Arrays) -> Arrays:
        """Return the configured outputs. Raises `ServerError` for missing outputs and wrong datatypes."""
        if not isinstance(outputs, Mapping):
            raise InternalError(
                f"run of model '{self._name}' returned {type(outputs).__name__}, expected arrays by name"
            )
        checked: dict[str, Any] = {}
        for name, datatype in self._datatypes.items():
            if name not in outputs:
                returned = ", ".join(outputs) or "none"
                raise InternalError(
                    f"model '{self._name}' did not return output '{name}', it returned {returned}"
                )
            array = np.asarray(outputs[name])
            try:
                found = DataType.of_numpy(array.dtype)
            except InvalidArgument as error:
                raise InternalError(f"output '{name}' of model '{self._name}': {error.message}") from None
            if found is not datatype:
                raise InvalidArgument(
                    f"configuration expects datatype {datatype.config_name} for output '{name}', model "
                    f"provides {found.config_name}"
                )
            checked[name] = array
        return checked

    def _server_error(self, error: BaseException, model: TensorModel) -> ServerError:
        if isinstance(error, ServerError):
            return error
        logger.error("model instance '%s' failed", model.instance.name, exc_info=error)
        return InternalError(
            f"failed to execute model instance '{model.instance.name}': {type(error).__name__}: {error}"
        )

    def _fail(
        self, streams: list[ResponseStream], error: ServerError
    ) -> list[tuple[ResponseStream, InferenceResponse]]:
        # A separate exception for each stream: consumers raise them concurrently.
        return [
            (
                stream,
                InferenceResponse(
                    self._name, self._version, error=ServerError(error.message, error.code), final=True
                ),
            )
            for stream in streams
        ]


@dataclass(frozen=True, slots=True)
class BatchWork:
    """Requests for one execution. `done(outcome)` is called in the instance's thread afterwards."""

    streams: list[ResponseStream]
    done: Callable[[Outcome], None]


WorkQueue = queue.SimpleQueue[BatchWork | None]
"""Work queue of instances; None ends one instance."""


class InstanceThread:
    """A thread that loads, runs and unloads one instance.

    `started` is resolved after loading, `ended` when the thread ends.
    """

    def __init__(
        self, name: str, make: Callable[[], TensorModel], executor: Executor, work: WorkQueue
    ) -> None:
        self.started: Future[None] = Future()
        self.ended: Future[None] = Future()
        self.work = work
        self._make = make
        self._executor = executor
        # A daemon thread: a model that never returns must not keep the server from exiting.
        self._thread = threading.Thread(target=self._run, name=f"model-{name}", daemon=True)
        self.alive = False

    def start(self) -> None:
        for future in (self.started, self.ended):
            future.set_running_or_notify_cancel()  # make them uncancellable
        self.alive = True
        self._thread.start()

    def _run(self) -> None:
        model: TensorModel | None = None
        try:
            try:
                model = self._make()
                model.load()
            except BaseException as error:
                self.started.set_exception(self._server_error(error))
                return
            self.started.set_result(None)
            while (work := self.work.get()) is not None:
                work.done(self._executor.execute(model, work.streams))
                del work  # do not keep the requests alive while waiting
        finally:
            self._unload(model)
            self.alive = False
            self.ended.set_result(None)

    def _server_error(self, error: BaseException) -> ServerError:
        if isinstance(error, ServerError):
            return error
        logger.error("model instance '%s' failed to load", self._thread.name, exc_info=error)
        return InternalError(f"{type(error).__name__}: {error}")

    def _unload(self, model: TensorModel | None) -> None:
        try:
            if model is not None:
                model.unload()
        except Exception:
            logger.exception("failed to unload a model instance")
