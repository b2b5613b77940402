"""Backends of the gRPC tests and the configurations of their models."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import numpy as np
from kserve_backends import TENSORS_OF_ALL_TYPES, LoadedBackend, identity_outputs

from neso.server.errors import Cancelled, InternalError
from neso.server.inference_response import ResponseStream
from neso.server.tensor import Tensor

BACKENDS = {
    "test_identity": f"{__name__}:Identity",
    "test_repeat": f"{__name__}:Repeat",
    "test_wait": "kserve_backends:Wait",
}
CONFIGS = {
    "identity": f'backend: "test_identity"\n{TENSORS_OF_ALL_TYPES}',
    "repeat": """
        backend: "test_repeat"
        model_transaction_policy { decoupled: true }
        input { name: "COUNT" data_type: TYPE_INT32 dims: [1] }
        output { name: "INDEX" data_type: TYPE_INT32 dims: [1] }
    """,
    "wait": """
        backend: "test_wait"
        max_batch_size: 4
        input { name: "X" data_type: TYPE_INT32 dims: [1] }
        output { name: "X" data_type: TYPE_INT32 dims: [1] }
    """,
}


class Identity(LoadedBackend):
    """Returns inputs and parameters. The parameters `raise`, `fail` and `twice` cause errors."""

    def submit(self, request: ResponseStream) -> None:
        parameters = request.request.parameters
        if "raise" in parameters:
            raise ZeroDivisionError("a bug")
        if "fail" in parameters:
            request.fail(InternalError(str(parameters["fail"])))
            return
        outputs = identity_outputs(request)
        request.send(self.response(*outputs, **parameters))
        if "twice" in parameters:
            request.send(self.response(*outputs))
        request.finish()


class Repeat(LoadedBackend):
    """Counts to COUNT, then sends an empty final response.

    Parameters: `delay` in seconds before each response, `fail_at` an index, `flag_last` ends with the last response.
    """

    cancelled: ClassVar[list[str]] = []
    counting: ClassVar[set[asyncio.Task[None]]] = set()

    def submit(self, request: ResponseStream) -> None:
        task = asyncio.get_running_loop().create_task(self._count(request))
        self.counting.add(task)
        task.add_done_callback(self.counting.discard)
        request.request.on_cancel(lambda: self._cancel(request, task))

    def _cancel(self, request: ResponseStream, task: asyncio.Task[None]) -> None:
        self.cancelled.append(request.request.id)
        task.cancel()
        request.fail(Cancelled("cancelled"))

    async def _count(self, request: ResponseStream) -> None:
        parameters = request.request.parameters
        count = int(request.request.inputs["COUNT"].array[0])
        for i in range(count):
            await asyncio.sleep(float(parameters.get("delay", 0)))
            if parameters.get("fail_at") == i:
                request.fail(InternalError(f"broke at {i}"))
                return
            response = self.response(Tensor.from_numpy("INDEX", np.array([i], np.int32)))
            request.send(response, final="flag_last" in parameters and i == count - 1)
        request.finish()
