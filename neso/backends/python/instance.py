"""One instance of a Python model: a thread that owns the object and executes its requests."""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from neso.backends.python.errors import TritonModelException
from neso.backends.python.model_module import forget_model_class, load_model_class, model_folder
from neso.backends.python.request import InferenceRequest
from neso.backends.python.response import InferenceResponse
from neso.backends.python.response_sender import ModelOutputs, Responder
from neso.server.errors import Cancelled, InternalError
from neso.server.inference_response import ResponseStream

logger = logging.getLogger(__name__)

WorkQueue = queue.SimpleQueue[ResponseStream | None]
"""Requests for the instances of a model; None tells one of them to end."""


class ModelInstance:
    """Runs `initialize`, `execute` and `finalize`, all in one thread. `started` and `ended` tell of its life.

    A model whose `execute` is `async def` has an event loop in a second thread.
    """

    def __init__(self, path: Path, args: dict[str, str], outputs: ModelOutputs, work: WorkQueue) -> None:
        self.started: Future[None] = Future()
        self.ended: Future[None] = Future()
        self._path = path
        self._args = args
        self._outputs = outputs
        self._work = work
        self._loop: asyncio.AbstractEventLoop | None = None
        # A daemon: a model that never returns from execute must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"model-{outputs.instance}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            with model_folder(self._path.parent):
                self._live()
        except Exception as error:
            logger.exception("instance '%s' of a Python model failed", self._outputs.instance)
            if not self.started.done():
                self.started.set_exception(error)
        finally:
            self.ended.set_result(None)

    def _live(self) -> None:
        try:
            model_class = load_model_class(self._path, self._args["model_name"])
            model = model_class()
            if not callable(getattr(model, "execute", None)):
                raise TritonModelException(f"TritonPythonModel in '{self._path}' has no execute function")
            if hasattr(model, "initialize"):
                model.initialize(self._args)
        except Exception as error:
            self.started.set_exception(error)
            return
        if inspect.iscoroutinefunction(model.execute):
            self._loop = _start_loop(self._outputs.instance, self._path.parent)
        self.started.set_result(None)
        while (stream := self._work.get()) is not None:
            self._execute(model, stream)
            del stream  # a request that the model let go of must not live on in this frame
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        if hasattr(model, "finalize"):
            model.finalize()
        forget_model_class(model_class)

    def _execute(self, model: Any, stream: ResponseStream) -> None:
        responder = Responder(stream, self._outputs)
        if responder.cancelled:
            responder.fail(Cancelled("the request was cancelled before it was executed"))  # or was already
            return
        stream.timeline.compute_start = time.monotonic_ns()
        try:
            request = InferenceRequest.from_server(responder, list(self._outputs.datatypes))
            stream.timeline.input_end = time.monotonic_ns()
            result = model.execute([request])
            del request
            if inspect.iscoroutine(result):
                self._await(result, responder)
            else:
                self._finish(result, responder)
        except Exception as error:
            self._fail(error, responder)

    def _await(self, coroutine: Coroutine[Any, Any, Any], responder: Responder) -> None:
        """Run a coroutine on the model's loop; other requests go on meanwhile when the model is decoupled."""
        if self._loop is None:
            self._loop = _start_loop(self._outputs.instance, self._path.parent)
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if not self._outputs.decoupled:
            self._finish(running.result(), responder)
            return

        def done(future: Future[Any], responder: Responder = responder) -> None:
            try:
                self._finish(future.result(), responder)
            except Exception as error:
                self._fail(error, responder)

        running.add_done_callback(done)

    def _finish(self, result: Any, responder: Responder) -> None:
        """Send what `execute` returned. Raises `TritonModelException` for what it must not return."""
        if self._outputs.decoupled:
            if result is not None:
                raise TritonModelException(
                    f"Python model '{self._outputs.instance}' is using the decoupled mode and the execute "
                    "function must return None."
                )
            return
        if not isinstance(result, list | tuple):
            raise TritonModelException(
                f"Expected a list in the execute return, found type '{type(result).__name__}'."
            )
        if len(result) != 1:
            raise TritonModelException(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:1, and InferenceResponse(s) size is:{len(result)}"
            )
        (response,) = result
        responder.stream.timeline.output_start = time.monotonic_ns()
        if isinstance(response, InferenceResponse):
            responder.send(response, final=True)
        elif response is not None:  # None: the model answers through the request's sender
            raise TritonModelException(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(response).__name__}'."
            )

    def _fail(self, error: Exception, responder: Responder) -> None:
        logger.error("execute of '%s' failed", self._outputs.instance, exc_info=error)
        text = str(error) if isinstance(error, TritonModelException) else f"{type(error).__name__}: {error}"
        responder.fail(
            InternalError(
                f"Failed to process the request(s) for model instance '{self._outputs.instance}', "
                f"message: {text}"
            )
        )


def _start_loop(name: str, folder: Path) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        with model_folder(folder):
            loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    threading.Thread(target=run, name=f"model-{name}-asyncio", daemon=True).start()
    return loop
