"""One request on its way from a thread to the core's loop, and its responses on their way back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from neso.server.errors import InternalError, ServerError, Unavailable
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse

if TYPE_CHECKING:
    from neso.server.inprocess.server import Server

logger = logging.getLogger(__name__)


class Flight:
    """Submits a request on the core's loop and hands `deliver` each response there; the last one has `final` set.

    Once it has `ended` it lets go of request and responses: who holds a flight holds no tensors.
    """

    __slots__ = ("_deliver", "_request", "_server", "ended")

    def __init__(
        self, server: Server, request: InferenceRequest, deliver: Callable[[InferenceResponse], None]
    ) -> None:
        self._server = server
        self._request = request
        self._deliver = deliver
        self.ended = False

    def start(self) -> None:
        """From any thread. Raises `Unavailable` when the server does not run."""
        self._server.post(self._begin)

    def cancel(self) -> None:
        """From any thread: tell the model that nobody wants the rest."""
        if self.ended:
            return
        try:
            self._server.post(self._cancel)
        except Unavailable:
            return  # the server has stopped, and ended the request

    def fail(self, error: ServerError) -> None:
        """On the core's loop: end with an error, unless it has ended."""
        if not self.ended:
            self._take(
                InferenceResponse(
                    self._request.model_name,
                    self._request.model_version,
                    self._request.id,
                    error=error,
                    final=True,
                )
            )

    def _begin(self) -> None:
        self._server.in_flight.add(self)
        try:
            core = self._server.core
            model = core.model(self._request.model_name, self._request.model_version)
            self._request.trace = trace = core.tracing.sample(model.name) if core.tracing.enabled else None
            try:
                stream = model.submit(self._request)
            finally:
                if trace is not None:
                    trace.end()  # it is over with the model
        except ServerError as error:
            self.fail(error)
        except Exception as error:
            logger.exception("a request for model '%s' could not be submitted", self._request.model_name)
            self.fail(InternalError(f"the request could not be submitted: {error}"))
        else:
            stream.consume(self._take)

    def _cancel(self) -> None:
        if not self.ended:
            self._request.cancel()

    def _take(self, response: InferenceResponse) -> None:
        deliver = self._deliver
        if response.final:
            self.ended = True
            self._server.in_flight.discard(self)
            del self._deliver, self._request
        deliver(response)
