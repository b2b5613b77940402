"""ModelStreamInfer: many requests and their responses, interleaved on one stream.

                read        submit               responses
client ──────▶ _read ──────▶ model ──────▶ _answer (a task a request) ──▶ _write ──▶ client
                 │                              │
                 └── half-close ──▶ _over ◀─────┘ the last one ends
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc.aio

from neso.frontends.header_forwarding import HeaderForwarding
from neso.frontends.kserve_grpc.calls import STOPPING, metadata_texts
from neso.frontends.kserve_grpc.decoding import decode_infer_message
from neso.frontends.kserve_grpc.encoding import encode_stream_error, encode_stream_response
from neso.frontends.kserve_grpc.errors import as_server_error
from neso.frontends.kserve_grpc.infer import only_response, read_request
from neso.frontends.kserve_grpc.parameters import RequestParameters
from neso.frontends.kserve_grpc.tracing import PROTOCOL, begin_trace
from neso.server.core import Core
from neso.server.errors import ServerError, Unavailable
from neso.server.inference_response import ResponseStream
from neso.server.tracing import Trace

STATUS_ERRORS_HEADER = "triton_grpc_error"


class InferStream:
    """One ModelStreamInfer RPC.

    The stream ends when the client has half-closed it and every request is answered. An error of one request
    is a message on the stream, unless the client's header asks that the first one become the RPC's status.
    """

    def __init__(
        self, core: Core, context: grpc.aio.ServicerContext, forwarding: HeaderForwarding | None
    ) -> None:
        self._core = core
        self._context = context
        self._status_errors = (STATUS_ERRORS_HEADER, "true") in (context.invocation_metadata() or ())
        self._forwarded = {} if forwarding is None else forwarding.parameters(metadata_texts(context))
        self._in_flight: dict[asyncio.Task[None], ResponseStream] = {}
        self._reader: asyncio.Task[None] | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing = asyncio.Lock()  # gRPC takes one message at a time

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Serve the stream to its end. Raises the `ServerError` that it is to end with.

        Cancelling this (the client has cancelled or is gone) cancels every request that is in flight.
        """
        self._reader = asyncio.create_task(self._read(requests))
        self._reader.add_done_callback(self._reading_ended)
        try:
            await self._over
        except ServerError:
            async with self._writing:  # gRPC takes no status while a message is on its way
                raise
        finally:
            self._reader.cancel()
            for task, responses in self._in_flight.items():
                responses.cancel()
                task.cancel()

    def drain(self) -> None:
        """Take no more requests: answer those in flight, then end with UNAVAILABLE."""
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        async for data in requests:
            model_name = request_id = ""
            trace = None
            began = time.monotonic_ns() if self._core.tracing.enabled else 0
            # Submitted here, not in the task: requests of a sequence must reach the model in order.
            try:
                message = decode_infer_message(data)
                model_name, request_id = message.request.model_name, message.request.id
                request, parameters = read_request(message, self._core.shared_memory)
                if self._forwarded:
                    request.parameters.update(self._forwarded)
                model = self._core.model(request.model_name, request.model_version)
                if began:
                    trace = request.trace = begin_trace(self._core, model.name, self._context, began)
                responses = model.submit(request)
            except Exception as failure:
                if trace is not None:
                    trace.end()
                await self._fail(model_name, request_id, as_server_error(failure, "ModelStreamInfer"))
                continue
            task = asyncio.create_task(self._answer(responses, model.decoupled, parameters, trace))
            self._in_flight[task] = responses
            task.add_done_callback(self._answer_ended)

    async def _answer(
        self, responses: ResponseStream, decoupled: bool, parameters: RequestParameters, trace: Trace | None
    ) -> None:
        try:
            if decoupled:
                await self._answer_many(responses, parameters, trace)
            else:
                response = await only_response(responses)
                if trace is not None:
                    trace.sending(PROTOCOL)
                await self._write(encode_stream_response(response, parameters.output_windows, final=True))
        except Exception as failure:
            responses.cancel()
            request = responses.request
            await self._fail(request.model_name, request.id, as_server_error(failure, "ModelStreamInfer"))
        finally:
            if trace is not None:
                trace.sent(PROTOCOL)

    async def _answer_many(
        self, responses: ResponseStream, parameters: RequestParameters, trace: Trace | None
    ) -> None:
        async for response in responses:
            if trace is not None:
                trace.sending(PROTOCOL)
            if response.error is not None:
                await self._fail(response.model_name, response.id, response.error, final=response.final)
            elif parameters.empty_final_response or not response.flag_only:
                windows = parameters.output_windows
                await self._write(encode_stream_response(response, windows, final=response.final))

    async def _fail(
        self, model_name: str, request_id: str, error: ServerError, *, final: bool = True
    ) -> None:
        if self._status_errors:
            self._end(error)
        else:
            await self._write(encode_stream_error(model_name, request_id, error, final=final))

    async def _write(self, message: bytes) -> None:
        async with self._writing:
            if self._over.done():
                return
            try:
                await self._context.write(message)
            except grpc.aio.BaseError:  # the client is gone
                self._end(None)

    def _answer_ended(self, task: asyncio.Task[None]) -> None:
        responses = self._in_flight.pop(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            responses.cancel()
            self._end(as_server_error(failure, "ModelStreamInfer"))
        self._end_if_idle()

    def _reading_ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled() and (failure := reader.exception()) is not None:
            self._end(as_server_error(failure, "ModelStreamInfer"))
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        assert self._reader is not None
        if self._reader.done() and not self._in_flight:
            self._end(Unavailable(STOPPING) if self._reader.cancelled() else None)

    def _end(self, error: ServerError | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
