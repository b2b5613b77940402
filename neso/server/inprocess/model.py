"""A model of an in-process server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from neso.server.errors import ServerError, Unavailable
from neso.server.inference_request import InferenceRequest, ParameterValue
from neso.server.inference_response import ResponseStream
from neso.server.inprocess.responses import AsyncResponseIterator, Item, Response, ResponseIterator
from neso.server.inprocess.tensor import make_input
from neso.server.metadata import ModelMetadata
from neso.server.model_config import config_to_dict

if TYPE_CHECKING:
    from neso.server.inprocess.server import Server


class Model:
    """A name and version to send requests to. Looked up anew for each request, so a reload is noticed.

    Version "" is the newest that is ready. All methods raise `ServerError` when there is no such model.
    """

    def __init__(self, server: Server, name: str, version: str = "") -> None:
        self._server = server
        self.name = name
        self.version = version

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {self.version!r})"

    def ready(self) -> bool:
        """Whether requests can be executed now."""
        try:
            return self._server.call(lambda core: core.model(self.name, self.version).ready())
        except ServerError:
            return False

    def metadata(self) -> ModelMetadata:
        """Names, datatypes and shapes of inputs and outputs."""
        return self._server.call(lambda core: core.model(self.name, self.version).metadata())

    def config(self) -> dict[str, Any]:
        """The completed configuration, by the names of config.pbtxt."""
        return config_to_dict(self._server.call(lambda core: core.model(self.name, self.version).config))

    def statistics(self) -> dict[str, Any]:
        """Counters and durations, by the names of the statistics extension."""
        return self._server.call(lambda core: core.model(self.name, self.version).statistics.snapshot())

    def infer(self, *, raise_on_error: bool = True, **request: Any) -> ResponseIterator:
        """Start a request and return its responses as they come. Raises `InvalidArgument` if it does not fit.

        Keywords: `inputs` (by name: arrays, DLPack objects, lists or scalars), and, all optional, `outputs` (names),
        `request_id`, `parameters`, `priority`, `timeout` (µs), `sequence_id`, `sequence_start`, `sequence_end`.
        """
        flight = _Flight(self._server)
        responses = ResponseIterator(flight.cancel, raise_on_error)
        made = self._make_request(**request)
        self._server.call(lambda core: flight.begin(made, responses.deliver))
        return responses

    def async_infer(self, *, raise_on_error: bool = True, **request: Any) -> AsyncResponseIterator:
        """`infer` for the event loop that this is called in: `async for response in model.async_infer(…)`.

        A request that does not fit the model raises when its first response is awaited.
        """
        flight = _Flight(self._server)
        responses = AsyncResponseIterator(flight.cancel, raise_on_error)
        made = self._make_request(**request)

        def begin() -> None:
            try:
                flight.begin(made, responses.deliver)
            except ServerError as error:
                responses.deliver(error)

        self._server.post(begin)
        return responses

    def _make_request(
        self,
        *,
        inputs: Mapping[str, Any],
        outputs: Iterable[str] = (),
        request_id: str = "",
        parameters: Mapping[str, ParameterValue] | None = None,
        priority: int = 0,
        timeout: int = 0,
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
    ) -> InferenceRequest:
        # In the caller's thread: to convert long lists would keep the server's loop busy.
        specs = self._server.running_core().model(self.name, self.version).signature.inputs
        tensors = {
            name: make_input(name, value, specs[name].datatype if name in specs else None)
            for name, value in inputs.items()
        }
        return InferenceRequest(
            self.name,
            tensors,
            self.version,
            request_id,
            tuple(outputs),
            dict(parameters or {}),
            priority,
            timeout,
            sequence_id,
            sequence_start,
            sequence_end,
        )


class _Flight:
    """One request on its way: carries responses from the server's loop to an iterator."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stream: ResponseStream | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, request: InferenceRequest, deliver: Callable[[Item], None]) -> None:
        """On the server's loop."""
        core = self._server.core
        model = core.model(request.model_name, request.model_version)
        trace = core.tracing.sample(model.name) if core.tracing.enabled else None
        request.trace = trace
        try:
            self._stream = model.submit(request)
        finally:
            if trace is not None:
                trace.end()  # it is over with the model
        self._task = asyncio.get_running_loop().create_task(self._carry(self._stream, deliver))

    def cancel(self) -> None:
        """From any thread."""
        try:
            self._server.post(self._cancel)
        except Unavailable:
            return  # the server has stopped, and ended the request

    def _cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()

    @staticmethod
    async def _carry(stream: ResponseStream, deliver: Callable[[Item], None]) -> None:
        try:
            async for response in stream:
                if not response.flag_only:
                    deliver(Response.of(response))
        except asyncio.CancelledError:
            deliver(Unavailable("the server has stopped"))
        else:
            deliver(None)
