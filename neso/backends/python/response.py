"""`pb_utils.InferenceResponse`: what a model answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from neso.backends.python.errors import TritonError, TritonModelException
from neso.backends.python.tensor import Tensor


class InferenceResponse:
    """Output tensors, or an error, with parameters (a dict of str, int, float or bool values)."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        for tensor in output_tensors:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(
                    f"output_tensors must hold pb_utils.Tensor objects, got {type(tensor).__name__}"
                )
        if error is not None and not isinstance(error, TritonError):
            raise TritonModelException(f"error must be a pb_utils.TritonError, got {type(error).__name__}")
        self._output_tensors = list(output_tensors)
        self._error = error
        self._parameters = _checked(parameters) if parameters else {}

    def output_tensors(self) -> list[Tensor]:
        return self._output_tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """The parameters as JSON."""
        return json.dumps(self._parameters)


def _checked(parameters: dict[str, Any]) -> dict[str, Any]:
    for key, value in parameters.items():
        if not isinstance(key, str) or not isinstance(value, str | int | float):
            raise TritonModelException(
                f"Expect parameters to have str keys and str, int, float or bool values, found '{key}': "
                f"{type(value).__name__}"
            )
    return dict(parameters)
