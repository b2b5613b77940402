"""One response, as a Python program likes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from neso.server.errors import ServerError
from neso.server.inference_request import ParameterValue
from neso.server.inference_response import InferenceResponse as CoreResponse
from neso.server.inprocess.memory import Device
from neso.server.inprocess.tensor import Tensor


@dataclass(slots=True)
class InferenceResponse:
    """One response of a model: outputs by name, or an error. `final`: there are no more."""

    model_name: str
    model_version: str
    request_id: str = ""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    error: ServerError | None = None
    final: bool = False

    @classmethod
    def of(cls, response: CoreResponse) -> InferenceResponse:
        """From the core's response."""
        return cls(
            response.model_name,
            response.model_version,
            response.id,
            {tensor.name: Tensor(tensor) for tensor in response.outputs},
            response.parameters,
            response.error,
            response.final,
        )

    @classmethod
    def on(cls, device: Device, response: CoreResponse) -> InferenceResponse:
        """From the core's response, with the outputs on a device. Raises `ServerError`."""
        made = cls.of(response)
        made.outputs = {name: tensor.to_device(device) for name, tensor in made.outputs.items()}
        return made
