"""ModelStreamInfer: many requests and their responses, interleaved on one stream.

             read               submit               responses
client ─▶ _read_requests ─▶ model ─▶ _respond (one task per request) ─▶ _write ─▶ client
                 │                        │
                 └─ half-close ─▶ _done ◀─┘ last response
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator

import grpc.aio

from neso.frontends.decoding import decode
from neso.frontends.kserve.errors import as_server_error
from neso.frontends.kserve.grpc_calls import STOPPING, text_metadata
from neso.frontends.kserve.grpc_codec import (
    INLINE_VALUES,
    decode_infer_message,
    encode_stream_error,
    encode_stream_response,
    read_infer_request,
    scan_infer_message,
)
from neso.frontends.kserve.grpc_infer import PROTOCOL, RECEIVE_STAMPS
from neso.frontends.kserve.grpc_tensors import OutputOptions
from neso.frontends.kserve.request_limits import RequestLimits
from neso.frontends.kserve.service import KServeService
from neso.server.errors import InternalError, ServerError, Unavailable
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.tracing import Trace

STATUS_ERRORS_HEADER = "triton_grpc_error"
MAX_UNWRITTEN = 1 << 20
"""Bytes of responses that wait for the client before requests are read; 64 times as many end the RPC."""


class InferStream:
    """One ModelStreamInfer RPC.

    The RPC ends when the client has half-closed it and all requests are complete. An error of a request is a
    message on the stream; with the header `triton_grpc_error: true` the first error becomes the status of the RPC.
    """

    def __init__(
        self, service: KServeService, context: grpc.aio.ServicerContext, limits: RequestLimits
    ) -> None:
        self._service = service
        self._limits = limits
        self._context = context
        self._status_errors = (STATUS_ERRORS_HEADER, "true") in (context.invocation_metadata() or ())
        self._client: str = getattr(context, "address", "")
        self._headers = functools.partial(text_metadata, context)
        self._in_flight: dict[asyncio.Task[None], ResponseStream] = {}
        self._reader: asyncio.Task[None] | None = None
        self._done = asyncio.Event()
        self._error: ServerError | None = None
        self._write_lock = asyncio.Lock()
        self._unwritten = 0  # bytes of the messages that wait for the lock or the client
        self._written = asyncio.Event()

    async def run(self, messages: AsyncIterator[bytes]) -> ServerError | None:
        """Serve the stream until it ends. Returns the error that becomes its status.

        When the client cancels or disconnects, this coroutine is cancelled and cancels every request in flight.
        """
        self._reader = asyncio.create_task(self._read_requests(messages))
        self._reader.add_done_callback(self._on_reader_done)
        try:
            await self._done.wait()
            error, self._error = self._error, None
            if error is not None:
                async with self._write_lock:  # the status must follow all messages
                    pass
        finally:
            self._cancel_all()
        return error

    def _cancel_all(self) -> None:
        """Cancel the tasks, and drop them: frames in the traceback of a cancelled task refer to this object."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
        for task, responses in self._in_flight.items():
            responses.cancel()
            task.cancel()

    def drain(self) -> None:
        """Accept no more requests; end with UNAVAILABLE after the responses to requests in flight."""
        if self._reader is not None:
            self._reader.cancel()

    async def _read_requests(self, messages: AsyncIterator[bytes]) -> None:
        service = self._service
        async for data in messages:
            while self._unwritten > MAX_UNWRITTEN:
                self._written.clear()
                await self._written.wait()
            model_name = request_id = ""
            trace = None
            received_ns = time.monotonic_ns() if service.tracing.enabled else 0
            # Submit here, not in the task: requests of a sequence must reach the model in order.
            try:
                scanned = scan_infer_message(data, self._limits)
                many = scanned.values > INLINE_VALUES
                infer = (
                    await decode(decode_infer_message, scanned.data, scanned.raw_inputs)
                    if many
                    else decode_infer_message(scanned.data, scanned.raw_inputs)
                )
                model_name, request_id = infer.request.model_name, infer.request.id
                if many:
                    request, output = await decode(
                        read_infer_request, infer, service.shared_memory, self._limits
                    )
                else:
                    request, output = read_infer_request(infer, service.shared_memory, self._limits)
                request.client, request.input_bytes = self._client, len(data)
                model = service.find_model(request.model_name, request.model_version)
                if received_ns:
                    header = dict(self._context.invocation_metadata() or ()).get
                    trace = service.start_trace(model.name, header, received_ns, RECEIVE_STAMPS)
                responses = service.submit(model, request, self._headers, trace)
            except Exception as error:
                if trace is not None:
                    trace.end()
                await self._fail(model_name, request_id, as_server_error(error, "ModelStreamInfer"))
                continue
            task = asyncio.create_task(self._respond(responses, model.decoupled, output, trace))
            self._in_flight[task] = responses
            task.add_done_callback(self._on_request_done)

    async def _respond(
        self, responses: ResponseStream, decoupled: bool, output: OutputOptions, trace: Trace | None
    ) -> None:
        """Write the responses of one request."""
        try:
            if decoupled:
                await self._write_all(responses, output, trace)
            else:
                response = await _only_response(responses)
                if trace is not None:
                    trace.sending(PROTOCOL)
                await self._write(encode_stream_response(response, output.shared, final=True))
        except Exception as error:
            responses.cancel()
            request = responses.request
            await self._fail(request.model_name, request.id, as_server_error(error, "ModelStreamInfer"))
        finally:
            if trace is not None:
                trace.sent(PROTOCOL)

    async def _write_all(self, responses: ResponseStream, output: OutputOptions, trace: Trace | None) -> None:
        async for response in responses:
            if trace is not None:
                trace.sending(PROTOCOL)
            if response.error is not None:
                await self._fail(response.model_name, response.id, response.error, final=response.final)
            elif output.empty_final_response or not response.flag_only:
                await self._write(encode_stream_response(response, output.shared, final=response.final))

    async def _fail(
        self, model_name: str, request_id: str, error: ServerError, *, final: bool = True
    ) -> None:
        """Report the error of a request."""
        if self._status_errors:
            self._end(error)
        else:
            await self._write(encode_stream_error(model_name, request_id, error, final=final))

    async def _write(self, message: bytes) -> None:
        if self._unwritten > 64 * MAX_UNWRITTEN:
            self._end(Unavailable("the client does not read the responses, the stream is cancelled"))
            return
        self._unwritten += len(message)
        try:
            async with self._write_lock:
                if not self._done.is_set():
                    await self._context.write(message)
        except grpc.aio.BaseError:  # the client disconnected
            self._end(None)
        finally:
            self._unwritten -= len(message)
            self._written.set()

    def _on_request_done(self, task: asyncio.Task[None]) -> None:
        responses = self._in_flight.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            responses.cancel()
            self._end(as_server_error(error, "ModelStreamInfer"))
        self._end_if_idle()

    def _on_reader_done(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled() and (error := reader.exception()) is not None:
            self._end(as_server_error(error, "ModelStreamInfer"))
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._reader is not None and self._reader.done() and not self._in_flight:
            self._end(Unavailable(STOPPING) if self._reader.cancelled() else None)

    def _end(self, error: ServerError | None) -> None:
        if not self._done.is_set():
            self._error = error
            self._done.set()


async def _only_response(responses: ResponseStream) -> InferenceResponse:
    """Return the single response of a non-decoupled model. Raises its error."""
    only: InferenceResponse | None = None
    async for response in responses:
        response.raise_error()
        if only is None:
            only = response
        elif not response.flag_only:
            raise InternalError(
                f"model '{response.model_name}' returned more than one response, "
                "which needs the decoupled transaction policy"
            )
    assert only is not None  # at least the final response
    return only
