"""From a `ModelInferRequest` to the core, and the one answer back."""

from __future__ import annotations

from neso.frontends.kserve_grpc.decoding import InferMessage
from neso.frontends.kserve_grpc.parameters import RequestParameters, read_parameters
from neso.frontends.kserve_grpc.tensors import read_classification, read_inputs, read_requested_outputs
from neso.frontends.kserve_grpc.windows import read_output_windows
from neso.server.errors import InternalError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.shared_memory.regions import REGION, SharedMemory


def read_request(
    infer: InferMessage, shared_memory: SharedMemory
) -> tuple[InferenceRequest, RequestParameters]:
    """What the message asks for. Raises `ServerError`."""
    message = infer.request
    parameters = read_parameters(message.parameters)
    if message.outputs:
        parameters.output_windows = read_output_windows(message, shared_memory)
    request = InferenceRequest(
        message.model_name,
        read_inputs(message, infer.raw_inputs, shared_memory),
        model_version=message.model_version,
        id=message.id,
        requested_outputs=read_requested_outputs(message) if message.outputs else (),
        classification=read_classification(message) if message.outputs else {},
        parameters=parameters.custom,
        priority=parameters.priority,
        timeout_us=parameters.timeout_us,
        sequence_id=parameters.sequence_id,
        sequence_start=parameters.sequence_start,
        sequence_end=parameters.sequence_end,
        # With shared memory off, read_inputs has refused such inputs.
        cacheable=not (shared_memory.enabled and any(REGION in wire.parameters for wire in message.inputs)),
    )
    return request, parameters


async def only_response(responses: ResponseStream) -> InferenceResponse:
    """The response of a model that gives exactly one to a request. Raises its error, if it is one."""
    only: InferenceResponse | None = None
    async for response in responses:
        if response.error is not None:
            raise response.error
        if only is None:
            only = response
        elif not response.flag_only:
            raise InternalError(
                f"model '{response.model_name}' gave more than one response, "
                "which needs the decoupled transaction policy"
            )
    assert only is not None  # the final one at least
    return only
