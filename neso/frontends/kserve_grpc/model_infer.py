"""ModelInfer, answered by the model's callback: a call costs no task."""

from __future__ import annotations

from neso.frontends.grpc import DeferredCall
from neso.frontends.kserve_grpc.calls import STOPPING, Calls
from neso.frontends.kserve_grpc.decoding import decode_infer_message
from neso.frontends.kserve_grpc.encoding import Windows, encode_response
from neso.frontends.kserve_grpc.errors import STATUS, as_server_error
from neso.frontends.kserve_grpc.infer import read_request
from neso.server.core import Core
from neso.server.errors import ServerError, Unavailable, Unsupported
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.single_response import SingleResponse


class ModelInfer:
    """Begins to answer calls: decodes the message and submits the request."""

    def __init__(self, core: Core, calls: Calls) -> None:
        self._core = core
        self._calls = calls

    def __call__(self, data: bytes, call: DeferredCall) -> None:
        try:
            responses, windows = self._submit(data)
        except Exception as failure:
            _fail(call, failure)
            return
        answer = _Answer(self._calls, call, responses, windows)
        call.on_cancel = answer.cancel
        self._calls.begin_waiting(answer)
        responses.consume(SingleResponse(answer))

    def _submit(self, data: bytes) -> tuple[ResponseStream, Windows]:
        """Raises `ServerError`."""
        message = decode_infer_message(data)
        model = self._core.model(message.request.model_name, message.request.model_version)
        if model.decoupled:
            raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        request, parameters = read_request(message, self._core.shared_memory)
        return model.submit(request), parameters.output_windows


class _Answer:
    """A call that waits for its response; it is called with that."""

    __slots__ = ("_call", "_calls", "_responses", "_windows")

    def __init__(self, calls: Calls, call: DeferredCall, responses: ResponseStream, windows: Windows) -> None:
        self._calls = calls
        self._call = call
        self._responses = responses
        self._windows = windows

    def __call__(self, response: InferenceResponse) -> None:
        self._calls.end_waiting(self)
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
        self._calls.end_waiting(self)
        self._responses.cancel()

    def evict(self) -> None:
        """The server stops."""
        _fail(self._call, Unavailable(STOPPING))
        self.cancel()


def _fail(call: DeferredCall, failure: Exception) -> None:
    error: ServerError = as_server_error(failure, "ModelInfer")
    call.fail(STATUS[error.code], error.message)
