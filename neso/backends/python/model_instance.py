"""One instance of a Python model. Creates the model object and executes requests in the thread that calls `run`."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neso.backends.python import forked
from neso.backends.python.errors import TritonModelException, describe
from neso.backends.python.model_module import (
    ModelCode,
    forget_model_class,
    load_model_class,
    model_folder,
)
from neso.backends.python.request import InferenceRequest
from neso.backends.python.response import InferenceResponse, ModelOutputs, RequestStream, Responder
from neso.backends.python.server_access import ServerAccess, server_access
from neso.server.errors import Cancelled, InternalError
from neso.server.import_turn import IMPORT_SECONDS, INITIALIZE_SECONDS, import_turn
from neso.server.inference_response import NEVER_EXECUTED
from neso.server.log.settings import request_fields
from neso.server.statistics import Timeline

logger = logging.getLogger(__name__)

OnExecuted = Callable[[Timeline], None]


@dataclass(frozen=True, slots=True)
class WorkItem:
    """Requests for one call of `execute`.

    - on_executed: called with the times of a successful execution, before its responses are sent
    - on_done: called when the instance can execute the next item

    Both are called in the instance's thread, or on the core's event loop if the instance runs in another process.
    """

    streams: Sequence[RequestStream]
    on_executed: OnExecuted | None = None
    on_done: Callable[[], None] | None = None

    def finish(self) -> None:
        """Report that the item is finished, successfully or not."""
        if self.on_done is not None:
            self.on_done()


WorkQueue = queue.SimpleQueue[WorkItem | None]
"""Work queue of instances; None ends one instance."""


class ModelInstance:
    """Runs `initialize`, `execute` and `finalize` in one thread. `started` is resolved when `initialize` has returned.

    If `execute` is `async def`, its coroutines run on an event loop in a second thread.
    """

    def __init__(
        self,
        code: ModelCode,
        args: dict[str, str],
        outputs: ModelOutputs,
        work: WorkQueue,
        access: ServerAccess,
    ) -> None:
        self.started: Future[None] = Future()
        self._code = code
        self._args = args
        self._outputs = outputs
        self.work = work
        self._access = access
        self._model: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readiness: Future[bool] | None = None
        # Models loaded by `initialize` are attributed to the load of this model.
        self._context = contextvars.copy_context()

    @property
    def name(self) -> str:
        return self._outputs.instance

    def run(self) -> None:
        """Load the model and execute work until the queue yields None or loading fails."""
        forked.install()
        try:
            with model_folder(self._code.folder), server_access(self._access):
                self._load_and_serve()
        except Exception as error:
            logger.exception("instance '%s' of a Python model failed", self.name)
            if not self.started.done():
                self.started.set_exception(error)

    def check_ready(self) -> Future[bool]:
        """Return the result of the model's `is_ready`; True if it has no such function.

        `is_ready` runs in a separate thread, concurrently with `execute`. Calls during a running call share its result.
        """
        is_ready = getattr(self._model, "is_ready", None)
        if is_ready is None:
            ready: Future[bool] = Future()
            ready.set_result(True)
            return ready
        if self._readiness is None or self._readiness.done():
            self._readiness = Future()
            threading.Thread(
                target=self._call_is_ready,
                args=(is_ready, self._readiness),
                name=f"model-{self.name}-is-ready",
                daemon=True,
            ).start()
        return self._readiness

    def _call_is_ready(self, is_ready: Callable[[], Any], result: Future[bool]) -> None:
        try:
            with model_folder(self._code.folder), server_access(self._access):
                ready = is_ready()
                if inspect.iscoroutine(ready):
                    # Prefer the model's event loop: the coroutine can use objects bound to it.
                    ready = (
                        asyncio.run(ready)
                        if self._loop is None
                        else asyncio.run_coroutine_threadsafe(ready, self._loop).result()
                    )
            if not isinstance(ready, bool):
                raise TritonModelException(
                    f"is_ready must return a bool, found type '{type(ready).__name__}'."
                )
        except Exception as error:
            logger.error("is_ready of '%s' failed", self.name, exc_info=error)
            ready = False
        result.set_result(ready)

    def _load_and_serve(self) -> None:
        try:
            with import_turn.held(IMPORT_SECONDS):
                model_class = load_model_class(self._code, self._args["model_name"])
        except Exception as error:
            self.started.set_exception(error)
            return
        try:
            self._serve(model_class)
        finally:
            forget_model_class(model_class)

    def _serve(self, model_class: type[Any]) -> None:
        try:
            with import_turn.held(INITIALIZE_SECONDS):
                model = model_class()
                if not callable(getattr(model, "execute", None)):
                    raise TritonModelException(
                        f"TritonPythonModel in '{self._code.file}' has no execute function"
                    )
                if hasattr(model, "initialize"):
                    self._context.run(model.initialize, self._args)
        except Exception as error:
            self.started.set_exception(error)
            return
        if inspect.iscoroutinefunction(model.execute):
            self._loop = _start_loop(self.name, self._code.folder, self._access)
        self._model = model
        self.started.set_result(None)
        while (work := self.work.get()) is not None:
            self._execute(model, work)
            on_done = work.on_done
            del work  # do not keep requests alive after the model has released them
            if on_done is not None:
                on_done()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        if hasattr(model, "finalize"):
            model.finalize()
        self._model = None

    def _execute(self, model: Any, work: WorkItem) -> None:
        responders = self._drop_cancelled(work.streams)
        if not responders:
            return
        started = time.monotonic_ns()
        for responder in responders:
            responder.stream.timeline.compute_start = started
        try:
            names, states = self._outputs.names, self._outputs.states
            requests = [InferenceRequest.from_server(responder, names, states) for responder in responders]
            input_end = time.monotonic_ns()
            for responder in responders:
                responder.stream.timeline.input_end = input_end
            result = model.execute(requests)
            del requests
            if inspect.iscoroutine(result):
                self._await(result, responders, work.on_executed)
            else:
                self._finish(result, responders, work.on_executed)
        except Exception as error:
            self._fail(error, responders)

    def _drop_cancelled(self, streams: Sequence[RequestStream]) -> list[Responder]:
        """Return the responders of the requests that are not cancelled. Fail the other requests."""
        active = []
        for stream in streams:
            responder = Responder(stream, self._outputs)
            if stream.request.cancelled:
                responder.fail(Cancelled(NEVER_EXECUTED))  # no effect if it has already failed
            else:
                active.append(responder)
        return active

    def _await(
        self, coroutine: Coroutine[Any, Any, Any], responders: list[Responder], on_executed: OnExecuted | None
    ) -> None:
        """Run a coroutine of `execute` on the model's event loop. Waits for it unless the model is decoupled."""
        if self._loop is None:
            self._loop = _start_loop(self.name, self._code.folder, self._access)
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if not self._outputs.decoupled:
            self._finish(running.result(), responders, on_executed)
            return

        def done(future: Future[Any], responders: list[Responder] = responders) -> None:
            try:
                self._finish(future.result(), responders, on_executed)
            except Exception as error:
                self._fail(error, responders)

        running.add_done_callback(done)

    def _finish(self, result: Any, responders: list[Responder], on_executed: OnExecuted | None) -> None:
        """Send the responses that `execute` returned. Raises `TritonModelException` for an invalid result."""
        self._check_result(result, len(responders))
        output_start = time.monotonic_ns()
        for responder in responders:
            responder.stream.timeline.output_start = output_start
        if on_executed is not None:
            on_executed(responders[0].stream.timeline)
        for response, responder in zip(result or (), responders, strict=False):
            if response is not None:  # None: the response is sent by a response sender, or later
                self._send(response, responder)
        if self._outputs.reschedule is not None:
            for responder in responders:
                responder.reschedule_if_requested()

    def _check_result(self, result: Any, count: int) -> None:
        if result is None:  # all responses are sent by response senders, or later
            return
        if self._outputs.decoupled:
            raise TritonModelException(
                f"Python model '{self.name}' is using the decoupled mode and the execute "
                "function must return None."
            )
        if not isinstance(result, list | tuple):
            raise TritonModelException(
                f"Expected a list in the execute return, found type '{type(result).__name__}'."
            )
        if len(result) != count:
            raise TritonModelException(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{count}, and InferenceResponse(s) size is:{len(result)}"
            )
        for response in result:
            if response is not None and not isinstance(response, InferenceResponse):
                raise TritonModelException(
                    "Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(response).__name__}'."
                )

    def _send(self, response: InferenceResponse, responder: Responder) -> None:
        """Send the response of one request. An invalid response fails only this request."""
        try:
            if responder.rescheduled:
                raise TritonModelException(
                    "Expected a None object in the execute function return list for reschduled request, found type "
                    f"'{type(response).__name__}'."
                )
            responder.send(response, final=True)
        except Exception as error:
            self._fail(error, [responder])

    def _fail(self, error: Exception, responders: list[Responder]) -> None:
        about = request_fields(responders[0].stream)
        logger.error("execute of '%s' failed", self.name, exc_info=error, extra=about)
        for responder in responders:
            responder.fail(
                InternalError(
                    f"Failed to process the request(s) for model instance '{self.name}', "
                    f"message: {describe(error)}"
                )
            )


def _start_loop(name: str, folder: Path, access: ServerAccess) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        with model_folder(folder), server_access(access):
            loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    threading.Thread(target=run, name=f"model-{name}-asyncio", daemon=True).start()
    return loop
