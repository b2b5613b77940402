"""The thread of one instance: it owns the model and executes what comes from a queue."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from neso.backends.tensor.execution import Executor, Outcome
from neso.backends.tensor.model import TensorModel
from neso.server.errors import InternalError, ServerError
from neso.server.inference_response import ResponseStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """Requests for one execution. `done(outcome)` is called in the instance's thread when it is over."""

    streams: list[ResponseStream]
    done: Callable[[Outcome], None]


WorkQueue = queue.SimpleQueue[Work | None]
"""For the instances of a model; None tells one of them to end."""


class InstanceThread:
    """Makes, loads, runs and unloads a model. `started` and `ended` tell of its life."""

    def __init__(
        self, name: str, make: Callable[[], TensorModel], executor: Executor, work: WorkQueue
    ) -> None:
        self.started: Future[None] = Future()
        self.ended: Future[None] = Future()
        self.work = work
        self._make = make
        self._executor = executor
        # A daemon: a model that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"model-{name}", daemon=True)

    def start(self) -> None:
        for future in (self.started, self.ended):
            future.set_running_or_notify_cancel()  # nobody can cancel them any more
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

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
                del work  # what the requests hold must not live on in this frame
        finally:
            self._unload(model)
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
