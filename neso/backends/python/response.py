"""`pb_utils.InferenceResponse` and `pb_utils.ResponseSender`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from neso.backends.python.arguments import as_list, as_parameters
from neso.backends.python.errors import TritonError, TritonModelException
from neso.backends.python.tensor import Tensor
from neso.server.errors import InternalError, ServerError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse as ServerResponse
from neso.server.statistics import Timeline
from neso.server.tensor import DataType
from neso.server.tensor import Tensor as ServerTensor

logger = logging.getLogger(__name__)


class InferenceResponse:
    """Output tensors or an error, with optional parameters (str, int, float or bool values)."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error must be a pb_utils.TritonError, got {type(error).__name__}")
        self._output_tensors = as_list(output_tensors, Tensor, "output_tensors")
        self._error = error
        self._parameters = as_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._output_tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """Return the response parameters as JSON."""
        return json.dumps(self._parameters)


TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class RequestTrace(Protocol):
    """Trace of a request: the server's trace, or its copy in a child process."""

    @property
    def id(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def context(self) -> dict[str, str] | None: ...


class RequestStream(Protocol):
    """A request in flight: the server's response stream, or its counterpart in a child process."""

    request: InferenceRequest
    timeline: Timeline

    @property
    def trace(self) -> RequestTrace | None: ...


Post = Callable[[Any, ServerResponse], None]
"""post(stream, response): send a response. Thread-safe."""


@dataclass
class ModelOutputs:
    """Output settings of one instance.

    - datatypes: datatypes of all outputs, including implicit states; `states`: names of the states
    - reschedule: reschedules the request of a stream; thread-safe; None if not supported
    - mismatched: outputs with a wrong datatype that was already logged
    """

    post: Post
    instance: str
    decoupled: bool
    datatypes: dict[str, DataType]
    states: tuple[str, ...] = ()
    reschedule: Callable[[Any], None] | None = None
    mismatched: set[str] = field(default_factory=set)
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.names = tuple(self.datatypes)

    def convert(self, response: InferenceResponse) -> ServerResponse:
        """Convert to the server's response. Undeclared outputs are dropped, as in Triton."""
        if response._error is not None:
            return ServerResponse("", "", error=response._error.to_server(), parameters=response._parameters)
        outputs = []
        for tensor in response._output_tensors:
            expected = self.datatypes.get(tensor.name())
            if expected is not None:
                output = tensor.to_server()
                if output.datatype is not expected and output.name not in self.mismatched:
                    self._note_mismatch(output, expected)
                outputs.append(output)
        return ServerResponse("", "", "", outputs, dict(response._parameters))

    def _note_mismatch(self, output: ServerTensor, expected: DataType) -> None:
        self.mismatched.add(output.name)
        logger.warning(
            "output '%s' of '%s' has datatype %s, but the configuration declares %s; it is sent unchanged",
            output.name,
            self.instance,
            output.datatype.value,
            expected.value,
        )


class Responder:
    """Sends the responses to one request. Thread-safe. Shared by the request and its response sender.

    If both are garbage collected before the final response, the request fails. Otherwise the client would wait
    forever.

    - closed: the model has sent the final flag, or the request has failed
    - ended: the final response was sent; of a model that is not decoupled, this is the first response
    """

    __slots__ = ("_outputs", "_released", "closed", "ended", "rescheduled", "stream")

    def __init__(self, stream: RequestStream, outputs: ModelOutputs) -> None:
        self.stream = stream
        self.closed = False
        self.ended = False
        self.rescheduled = False  # requested by the model
        self._released = False  # returned to the scheduler
        self._outputs = outputs

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Send a response, the final flag, or both.

        Raises `TritonModelException` after the final flag and, if not decoupled, for a second response or for the final
        flag without a response.
        """
        if self.closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if not self._outputs.decoupled and (response is not None) is self.ended:
            wrong = "more than one" if self.ended else "complete final before sending a"
            raise TritonModelException(
                f"Unable to send response. Non-decoupled model cannot send {wrong} response."
            )
        converted = ServerResponse("", "") if response is None else self._outputs.convert(response)
        self.closed = final
        if not self.ended:
            self.ended = converted.final = final or not self._outputs.decoupled
            self._outputs.post(self.stream, converted)

    def set_reschedule(self, reschedule: bool) -> None:
        """Set whether to execute the request again. Raises `TritonModelException` if not supported."""
        if reschedule and self._outputs.reschedule is None:
            raise TritonModelException(
                "Unable to set request release flags. Rescheduling requests needs "
                "'sequence_batching { iterative_sequence: true }' in the model configuration."
            )
        self.rescheduled = reschedule

    def reschedule_if_requested(self) -> None:
        """After an execution, reschedule the request if `set_reschedule` was called."""
        if self.rescheduled and not self.ended and self._outputs.reschedule is not None:
            self._released = True
            self._outputs.reschedule(self.stream)

    def fail(self, error: ServerError) -> None:
        """Fail the request, unless it has ended."""
        self.closed = True
        if not self.ended:
            self.ended = True
            self._outputs.post(self.stream, ServerResponse("", "", error=error, final=True))

    def __del__(self) -> None:
        if not self.ended and not self._released:
            self.fail(
                InternalError(
                    f"model instance '{self._outputs.instance}' released a request without a final response"
                )
            )


class ResponseSender:
    """Sends the responses to a request, the last one with the final flag."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, the final flag, or both."""
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(f"Unable to send response. Unsupported flag provided: {flags}")
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flag is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"response must be a pb_utils.InferenceResponse, got {type(response).__name__}")
        self._responder.send(response, final=bool(flags))

    def is_cancelled(self) -> bool:
        """Return whether the request was cancelled."""
        return self._responder.stream.request.cancelled
