"""ModelInfer, answered by the model's callback: a call costs no task."""

from __future__ import annotations

import time

from neso.frontends.header_forwarding import HeaderForwarding
from neso.frontends.kserve_grpc.calls import STOPPING, Calls, metadata_texts
from neso.frontends.kserve_grpc.decoding import InferMessage, decode_infer_message
from neso.frontends.kserve_grpc.encoding import Windows, encode_response
from neso.frontends.kserve_grpc.errors import STATUS, as_server_error
from neso.frontends.kserve_grpc.infer import read_request
from neso.frontends.kserve_grpc.tracing import begin_trace, end_with_reply
from neso.frontends.transport.grpc import CallbackCall
from neso.server.core import Core
from neso.server.errors import ServerError, Unavailable, Unsupported
from neso.server.inference_response import InferenceResponse, ResponseStream, SingleResponse
from neso.server.model import Model
from neso.server.tracing import Trace


class ModelInfer:
    """Begins to answer calls: decodes the message and submits the request."""

    def __init__(self, core: Core, calls: Calls, forwarding: HeaderForwarding | None = None) -> None:
        self._core = core
        self._calls = calls
        self._forwarding = forwarding

    def __call__(self, data: bytes, call: CallbackCall) -> None:
        began = time.monotonic_ns() if self._core.tracing.enabled else 0
        trace: Trace | None = None
        try:
            message = decode_infer_message(data)
            model = self._find_model(message)
            trace = begin_trace(self._core, model.name, call, began) if began else None
            responses, windows = self._submit(message, model, call, trace)
        except Exception as failure:
            _fail(call, failure)
            if trace is not None:
                end_with_reply(trace)
            return
        answer = _Answer(self._calls, call, responses, windows, trace)
        call.on_cancel = answer.cancel
        self._calls.begin_waiting(answer)
        responses.consume(SingleResponse(answer))

    def _find_model(self, message: InferMessage) -> Model:
        """Raises `ServerError`."""
        model = self._core.model(message.request.model_name, message.request.model_version)
        if model.decoupled:
            raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        return model

    def _submit(
        self, message: InferMessage, model: Model, call: CallbackCall, trace: Trace | None
    ) -> tuple[ResponseStream, Windows]:
        """Raises `ServerError`."""
        request, parameters = read_request(message, self._core.shared_memory)
        if self._forwarding is not None:
            request.parameters.update(self._forwarding.parameters(metadata_texts(call)))
        request.trace = trace
        return model.submit(request), parameters.output_windows


class _Answer:
    """A call that waits for its response; it is called with that."""

    __slots__ = ("_call", "_calls", "_responses", "_trace", "_windows")

    def __init__(
        self,
        calls: Calls,
        call: CallbackCall,
        responses: ResponseStream,
        windows: Windows,
        trace: Trace | None,
    ) -> None:
        self._calls = calls
        self._call = call
        self._responses = responses
        self._windows = windows
        self._trace = trace

    def __call__(self, response: InferenceResponse) -> None:
        self._end()
        if self._call.done:
            return
        try:
            if response.error is not None:
                raise response.error
            reply = encode_response(response, self._windows)
        except Exception as failure:
            _fail(self._call, failure)
        else:
            self._call.reply(reply)

    def cancel(self) -> None:
        """The client is gone."""
        self._end()
        self._responses.cancel()

    def evict(self) -> None:
        """The server stops."""
        _fail(self._call, Unavailable(STOPPING))
        self.cancel()

    def _end(self) -> None:
        self._calls.end_waiting(self)
        trace, self._trace = self._trace, None
        if trace is not None:
            end_with_reply(trace)


def _fail(call: CallbackCall, failure: Exception) -> None:
    error: ServerError = as_server_error(failure, "ModelInfer")
    call.fail(STATUS[error.code], error.message)
