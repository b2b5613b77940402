"""Triton's response."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neso.compat.tritonserver.tensor import Tensor
from neso.server.errors import ServerError
from neso.server.inference_request import ParameterValue
from neso.server.inference_response import InferenceResponse as CoreResponse

if TYPE_CHECKING:
    from neso.compat.tritonserver.model import Model


@dataclass
class InferenceResponse:
    """One response of a model. A final one may be the flag alone, without outputs."""

    model: Model
    request_id: str | None = None
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    error: ServerError | None = None
    classification_label: str | None = None
    final: bool = False

    @classmethod
    def of(cls, model: Model, response: CoreResponse) -> InferenceResponse:
        """From the core's response."""
        return cls(
            model.at(response.model_version),
            response.id,
            response.parameters,
            {tensor.name: Tensor.of(tensor) for tensor in response.outputs},
            response.error,
            None,
            response.final,
        )
