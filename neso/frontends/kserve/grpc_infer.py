"""ModelInfer: unary inference that responds from the model's callback, without a task per call."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from neso.frontends.decoding import decode
from neso.frontends.kserve.errors import as_server_error
from neso.frontends.kserve.grpc_calls import STOPPING, ActiveCalls, text_metadata
from neso.frontends.kserve.grpc_codec import (
    GRPC_STATUSES,
    INLINE_VALUES,
    InferMessage,
    ScannedMessage,
    decode_infer_message,
    encode_response,
    read_infer_request,
    scan_infer_message,
)
from neso.frontends.kserve.grpc_tensors import OutputOptions
from neso.frontends.kserve.request_limits import RequestLimits
from neso.frontends.kserve.service import KServeService, finish_trace
from neso.frontends.transport.grpc import CallbackCall
from neso.server.errors import Unavailable
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream, SingleResponse
from neso.server.shared_memory.regions import SharedMemoryWindow
from neso.server.tracing import Trace

PROTOCOL = "GRPC"  # part of the names of trace activities
RECEIVE_STAMPS = ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END")


Decoded = tuple[InferMessage, InferenceRequest, OutputOptions]


class ModelInfer:
    """Handler of ModelInfer: decodes the message and submits the request.

    Messages with many fields are decoded in a thread.
    """

    def __init__(self, service: KServeService, calls: ActiveCalls, limits: RequestLimits) -> None:
        self._service = service
        self._calls = calls
        self._limits = limits
        self._max_unscanned = min(limits.values, INLINE_VALUES)

    def __call__(self, data: bytes, call: CallbackCall) -> None:
        received_ns = time.monotonic_ns() if self._service.tracing.enabled else 0
        responder = _Responder(self._calls, call)
        size = len(data)
        raw_inputs = None
        try:
            if size > self._max_unscanned:
                scanned = scan_infer_message(data, self._limits)
                if scanned.values > INLINE_VALUES:
                    self._decode_in_thread(scanned, size, responder, call, received_ns)
                    return
                _, data, raw_inputs = scanned
            infer = decode_infer_message(data, raw_inputs)
            self._start(infer, None, size, responder, call, received_ns)
        except Exception as error:
            responder.fail(error)

    def _decode_in_thread(
        self, scanned: ScannedMessage, size: int, responder: _Responder, call: CallbackCall, received_ns: int
    ) -> None:
        def read() -> Decoded:
            infer = decode_infer_message(scanned.data, scanned.raw_inputs)
            return infer, *read_infer_request(infer, self._service.shared_memory, self._limits)

        def start(future: asyncio.Future[Decoded]) -> None:
            self._calls.remove_pending(responder)
            if call.done:
                future.exception()  # retrieved, so that it is not logged
                return
            try:
                infer, request, output = future.result()
                self._start(infer, (request, output), size, responder, call, received_ns)
            except Exception as error:
                responder.fail(error)

        self._calls.add_pending(responder)
        call.on_cancel = responder.cancel
        decode(read).add_done_callback(start)

    def _start(
        self,
        infer: InferMessage,
        read: tuple[InferenceRequest, OutputOptions] | None,
        size: int,
        responder: _Responder,
        call: CallbackCall,
        received_ns: int,
    ) -> None:
        """Submit a request, which `read` holds if it was read in a thread. `size`: bytes of the message."""
        service = self._service
        message = infer.request
        model = service.find_unary_model(message.model_name, message.model_version, "ModelInfer RPC")
        if received_ns:
            header: Callable[[str], Any] = dict(call.invocation_metadata()).get
            responder.trace = service.start_trace(model.name, header, received_ns, RECEIVE_STAMPS)
        request, output = read or read_infer_request(infer, service.shared_memory, self._limits)
        request.client, request.input_bytes = call.address, size
        responder.shared = output.shared
        self._calls.add_pending(responder)
        call.on_cancel = responder.cancel
        headers = functools.partial(text_metadata, call)
        responder.stream = stream = service.submit(model, request, headers, responder.trace)
        stream.consume(SingleResponse(responder))


class _Responder:
    """Replies to a call when the model responds."""

    __slots__ = ("_call", "_calls", "shared", "stream", "trace")

    def __init__(self, calls: ActiveCalls, call: CallbackCall) -> None:
        self._calls = calls
        self._call = call
        self.shared: Mapping[str, SharedMemoryWindow] = {}
        self.stream: ResponseStream | None = None
        self.trace: Trace | None = None

    def __call__(self, response: InferenceResponse) -> None:
        self._finish()
        if self._call.done:
            return
        try:
            if response.error is not None:
                response.raise_error()
            reply = encode_response(response, self.shared)
        except Exception as error:
            self.fail(error)
        else:
            self._call.reply(reply)

    def fail(self, failure: Exception) -> None:
        """End the call with the status of an error."""
        error = as_server_error(failure, "ModelInfer")
        self._call.fail(GRPC_STATUSES[error.code], error.message)
        self._finish()

    def cancel(self) -> None:
        """Handle a cancellation by the client."""
        self._finish()
        if self.stream is not None:
            self.stream.cancel()

    def abort(self) -> None:
        """Handle the stop of the server."""
        self.fail(Unavailable(STOPPING))
        self.cancel()

    def _finish(self) -> None:
        self._calls.remove_pending(self)
        trace, self.trace = self.trace, None
        if trace is not None:
            finish_trace(trace, PROTOCOL)
