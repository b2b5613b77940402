"""Backends of the gRPC tests and the configurations of their models."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import numpy as np

from neso.server.backend import Backend
from neso.server.errors import Cancelled, InternalError
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.tensor import DataType, Tensor

BACKENDS = {
    "test_identity": f"{__name__}:Identity",
    "test_repeat": f"{__name__}:Repeat",
    "test_wait": f"{__name__}:Wait",
}
CONFIGS = {
    "identity": 'backend: "test_identity"\n'
    + "".join(
        f'input {{ name: "IN_{t.value}" data_type: {t.config_name} dims: [-1] optional: true }}\n'
        f'output {{ name: "OUT_{t.value}" data_type: {t.config_name} dims: [-1] }}\n'
        for t in DataType
    ),
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


class LoadedBackend(Backend):
    """Base class without loading."""

    async def load(self) -> None:
        pass

    async def unload(self) -> None:
        pass

    def response(self, *outputs: Tensor, **parameters: bool | int | float | str) -> InferenceResponse:
        context = self.context
        return InferenceResponse(
            context.name, context.version, outputs=list(outputs), parameters=dict(parameters)
        )


class Identity(LoadedBackend):
    """Returns inputs and parameters. The parameters `raise`, `fail` and `twice` cause errors."""

    def submit(self, request: ResponseStream) -> None:
        parameters = request.request.parameters
        if "raise" in parameters:
            raise ZeroDivisionError("a bug")
        if "fail" in parameters:
            request.fail(InternalError(str(parameters["fail"])))
            return
        outputs = [
            Tensor("OUT" + name.removeprefix("IN"), tensor.datatype, tensor.array)
            for name, tensor in request.request.inputs.items()
        ]
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


class Wait(LoadedBackend):
    """Never responds; ends cancelled requests."""

    waiting: ClassVar[list[ResponseStream]] = []
    cancelled: ClassVar[list[str]] = []

    def submit(self, request: ResponseStream) -> None:
        self.waiting.append(request)
        request.request.on_cancel(lambda: self._cancel(request))

    def _cancel(self, request: ResponseStream) -> None:
        self.cancelled.append(request.request.id)
        request.fail(Cancelled("cancelled"))
