"""Backends of the HTTP tests and the configurations of their models."""

from __future__ import annotations

import numpy as np
from kserve_backends import TENSORS_OF_ALL_TYPES, LoadedBackend, identity_outputs

from neso.server.errors import InternalError, Unavailable
from neso.server.inference_response import ResponseStream
from neso.server.tensor import DataType, Tensor

BACKENDS = {
    "test_identity": f"{__name__}:Identity",
    "test_text": f"{__name__}:Text",
    "test_wait": "kserve_backends:Wait",
}
_TEXT = """
    backend: "test_text"
    input { name: "PROMPT" data_type: TYPE_STRING dims: [1] }
    input { name: "STREAM" data_type: TYPE_BOOL dims: [1] optional: true }
    input { name: "REPEAT" data_type: TYPE_INT32 dims: [1] optional: true }
    output { name: "TEXT" data_type: TYPE_STRING dims: [-1] }
"""
CONFIGS = {
    "identity": f'backend: "test_identity"\n{TENSORS_OF_ALL_TYPES}',
    "batched": """
        backend: "test_identity"
        max_batch_size: 8
        input { name: "IN" data_type: TYPE_FP32 dims: [2, -1] }
        output { name: "OUT" data_type: TYPE_FP32 dims: [2, -1] }
    """,
    "strings": """
        backend: "test_identity"
        max_batch_size: 8
        input { name: "IN" data_type: TYPE_STRING dims: [1] }
        output { name: "OUT" data_type: TYPE_STRING dims: [1] }
    """,
    "any_strings": """
        backend: "test_identity"
        input { name: "IN" data_type: TYPE_STRING dims: [-1] }
        output { name: "OUT" data_type: TYPE_STRING dims: [-1] }
    """,
    "grid": """
        backend: "test_identity"
        input { name: "IN" data_type: TYPE_INT32 dims: [-1, 3, -1] }
        output { name: "OUT" data_type: TYPE_INT32 dims: [-1, 3, -1] }
    """,
    "text": _TEXT,
    "decoupled": _TEXT + "model_transaction_policy { decoupled: true }",
    "wait": """
        backend: "test_wait"
        input { name: "X" data_type: TYPE_INT32 dims: [1] }
        output { name: "X" data_type: TYPE_INT32 dims: [1] }
    """,
}


class Identity(LoadedBackend):
    """Returns the inputs, and the parameters and fields of the request as parameters."""

    def submit(self, request: ResponseStream) -> None:
        requested = request.request
        fields = {
            name: value
            for name in ("priority", "timeout_us", "sequence_id", "sequence_start", "sequence_end")
            if (value := getattr(requested, name))
        }
        request.send(self.response(*identity_outputs(request), **requested.parameters, **fields), final=True)


class Text(LoadedBackend):
    """Sends REPEAT responses (default 1) with the prompt, its shape and the parameters.

    Parameters: `fail_at` an index, `flag_only` ends with a separate final flag, `bytes` returns invalid UTF-8.
    """

    def submit(self, request: ResponseStream) -> None:
        inputs, parameters = request.request.inputs, request.request.parameters
        count = int(inputs["REPEAT"].array[0]) if "REPEAT" in inputs else 1
        for i in range(count):
            if parameters.get("fail_at") == i:
                request.fail(Unavailable(f"broke at {i}"))
                return
            text = Tensor("TEXT", DataType.BYTES, inputs["PROMPT"].array)
            if "bytes" in parameters:
                text = Tensor("TEXT", DataType.BYTES, np.array([b"\xffa"], np.object_))
            request.send(
                self.response(text, **parameters), final="flag_only" not in parameters and i == count - 1
            )
        if parameters.get("fail_at") == count:
            request.fail(InternalError("broke at the end"))
        request.finish()
