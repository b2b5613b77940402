"""Backends and tensors of the models of the HTTP and gRPC tests."""

from __future__ import annotations

from typing import ClassVar

from neso.server.backend import Backend
from neso.server.errors import Cancelled
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.tensor import DataType, Tensor

TENSORS_OF_ALL_TYPES = "".join(
    f'input {{ name: "IN_{t.value}" data_type: {t.config_name} dims: [-1] optional: true }}\n'
    f'output {{ name: "OUT_{t.value}" data_type: {t.config_name} dims: [-1] }}\n'
    for t in DataType
)


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


def identity_outputs(request: ResponseStream) -> list[Tensor]:
    """Return the inputs IN… of a request as outputs OUT…."""
    return [
        Tensor("OUT" + name.removeprefix("IN"), tensor.datatype, tensor.array)
        for name, tensor in request.request.inputs.items()
    ]


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
