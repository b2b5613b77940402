"""Request messages for the test models."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2


def one_input(
    datatype: str = "FP32", shape: tuple[int, ...] = (2,), name: str = "", **fields: Any
) -> dict[str, Any]:
    """Fields of an `InferInputTensor`, by default of the identity model."""
    return {"name": name or f"IN_{datatype}", "datatype": datatype, "shape": shape, **fields}


def waiting_request(request_id: str) -> service_pb2.ModelInferRequest:
    """A request that gets no response."""
    return service_pb2.ModelInferRequest(
        model_name="wait",
        id=request_id,
        inputs=[one_input("INT32", (1, 1), "X")],
        raw_input_contents=[bytes(4)],
    )


def repeat_request(
    request_id: str, count: int, *, empty_final: bool = False, **parameters: float
) -> service_pb2.ModelInferRequest:
    """A request that gets `count` responses."""
    message = service_pb2.ModelInferRequest(
        model_name="repeat",
        id=request_id,
        inputs=[one_input("INT32", (1,), "COUNT")],
        raw_input_contents=[count.to_bytes(4, "little")],
    )
    for key, value in parameters.items():
        message.parameters[key].double_param = value
    if empty_final:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message
