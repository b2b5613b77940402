"""The one response of a request to a model that is not decoupled."""

from __future__ import annotations

from collections.abc import Callable

from neso.server.errors import InternalError
from neso.server.inference_response import InferenceResponse


class SingleResponse:
    """What a `ResponseStream` gives its responses to: calls `done` once, when the request has ended.

    `done` gets the response, or if there were more of them a response with an `InternalError`.
    """

    __slots__ = ("_count", "_done", "_first")

    def __init__(self, done: Callable[[InferenceResponse], None]) -> None:
        self._done = done
        self._first: InferenceResponse | None = None
        self._count = 0

    def __call__(self, response: InferenceResponse) -> None:
        # One without outputs is an answer too, unless it only says that there was one.
        if self._first is None:
            self._first = response
            self._count = 1
        elif not response.flag_only:
            self._count += 1
        if response.final:
            if self._count > 1:
                self._first.error = InternalError(f"expected a single response, got {self._count}")
            self._done(self._first)
