"""`ServerAccess` for models in the server's process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from neso.backends.python.errors import TritonModelException
from neso.backends.python.server_access import Deliver, LoopCalls, ServerAccess
from neso.server.backlog import CALL_OVERFLOW_SLACK, Backlog
from neso.server.errors import InternalError, ServerError, Unavailable
from neso.server.import_turn import import_turn
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.metrics.custom import CustomFamily, MetricKind

if TYPE_CHECKING:
    from neso.server.backend import ModelContext
    from neso.server.core import Core
    from neso.server.model import Model

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class LocalServer(ServerAccess):
    """Runs calls from the model's threads on the core's event loop. Created on this loop."""

    def __init__(self, context: ModelContext) -> None:
        self.core = context.core
        self.metrics = context.metrics
        self.loop = loop = asyncio.get_running_loop()
        self.calls = LoopCalls(loop)

    @property
    def server(self) -> Core:
        return self.core

    @property
    def ended(self) -> bool:
        return self.loop.is_closed()

    def call(self, request: InferenceRequest, decoupled: bool, deliver: Deliver) -> ModelCall:
        if self.ended:
            raise TritonModelException("the server has ended")
        call = ModelCall(self, request, decoupled, deliver)
        self.calls.post(call.start)
        return call

    def load_model(self, name: str, config: str | None, files: dict[str, bytes] | None) -> None:
        self._run(self.core.load_model(name, config, files))

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        self._run(self.core.unload_model(name, unload_dependents))

    def model_ready(self, name: str, version: str) -> bool:
        return self._run(self.core.check_model_ready(name, version))

    def metric_family(self, name: str, description: str, kind: str) -> CustomFamily:
        return self.core.custom_metrics.family(name, description, MetricKind(kind))

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the core's event loop and wait. Raises `TritonModelException` for a `ServerError`."""
        import_turn.give_up()  # `initialize` may load a model that needs the turn
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop).result()
        except ServerError as error:
            raise TritonModelException(error.message) from None
        except RuntimeError as error:
            work.close()
            raise TritonModelException(f"the server has ended: {error}") from None


class ModelCall:
    """A BLS call. `deliver` is called with each response, on the core's event loop; the last response is final.

    The called model waits while `max_call_backlog` bytes of responses of a decoupled call wait for the calling model.
    Models that call each other could wait for each other forever. Therefore the call fails if the calling model takes
    no response for `call_backlog_timeout` seconds meanwhile.
    """

    def __init__(
        self, access: LocalServer, request: InferenceRequest, decoupled: bool, deliver: Deliver
    ) -> None:
        self._access, self._request, self._decoupled, self._deliver = access, request, decoupled, deliver
        self._stream: ResponseStream | None = None
        self._cancelled = False
        options = access.core.options
        limit = options.max_call_backlog
        self._backlog = Backlog(limit, limit + max(limit, CALL_OVERFLOW_SLACK))
        self._timeout = options.call_backlog_timeout
        self._taken_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Cancel the request. Thread-safe."""
        self._access.calls.post(self._cancel)

    def taken(self, size: int) -> None:
        """Account for responses of `size` bytes that the calling model has taken. Thread-safe."""
        self._access.calls.post(self._taken, size)

    def start(self) -> None:
        """Submit the request. Must be called on the core's event loop."""
        try:
            model: Model = self._access.core.model(self._request.model_name, self._request.model_version)
            if model.decoupled and not self._decoupled:
                raise ServerError(
                    f"Model {model.name} is using the decoupled. The current BLS request call doesn't support models "
                    "using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
                    "'async_exec' calls for decoupled models.'"
                )
            self._request.client = ""
            if self._decoupled:
                self._request.backlog = self._backlog
            self._stream = model.submit(self._request)
        except ServerError as error:
            name = self._request.model_name
            self._fail(error.with_message(f"Model {name} - Error when running inference: {error.message}"))
            return
        except Exception as error:
            # The calling model waits for a response, so send it the error.
            logger.exception("the call of model '%s' failed", self._request.model_name)
            self._fail(InternalError(f"{type(error).__name__}: {error}"))
            return
        if self._cancelled:
            self._stream.cancel()
        self._stream.consume(self._receive, frees=False)

    def _receive(self, response: InferenceResponse) -> None:
        if response.final:
            self._close_backlog()
        elif self._decoupled:
            if not response.backlog_size:  # responses of threads are counted when they are made
                response.backlog_size = response.size
                self._backlog.add(response.backlog_size)
            if self._backlog.overflows(response.backlog_size):
                self._abort()
                return
            if self._timer is None and self._backlog.full:
                self._taken_at = self._access.loop.time()
                self._timer = self._access.loop.call_later(self._timeout, self._check_progress)
        self._deliver(response)

    def _taken(self, size: int) -> None:
        self._taken_at = self._access.loop.time()
        self._backlog.remove(size)

    def _check_progress(self) -> None:
        """Fail the call if the called model has waited too long. Otherwise check again while the backlog is full."""
        self._timer = None
        left = self._taken_at + self._timeout - self._access.loop.time()
        if self._backlog.delays and left <= 0:
            self._abort()
        elif self._backlog.full:
            self._timer = self._access.loop.call_later(
                left if left > 0 else self._timeout, self._check_progress
            )

    def _abort(self) -> None:
        assert self._stream is not None
        name = self._request.model_name
        logger.warning("a call of model '%s' is cancelled: its responses are not read", name)
        self._stream.abort(
            Unavailable(f"the responses of the call of model '{name}' are not read, it is cancelled")
        )

    def _close_backlog(self) -> None:
        self._backlog.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fail(self, error: ServerError) -> None:
        self._deliver(InferenceResponse("", "", error=error, final=True))

    def _cancel(self) -> None:
        self._cancelled = True
        self._close_backlog()
        if self._stream is not None:
            self._stream.cancel()
