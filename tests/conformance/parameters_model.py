"""A model that returns the parameters of its request as JSON."""

from __future__ import annotations

from pathlib import Path

NAME = "parameters"
_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", np.array([request.parameters().encode()], np.object_))]
            )
            for request in requests
        ]
"""
_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""


def write(repository: Path) -> None:
    """Write the model into the repository."""
    (repository / NAME / "1").mkdir(parents=True)
    (repository / NAME / "1" / "model.py").write_text(_MODEL)
    (repository / NAME / "config.pbtxt").write_text(_CONFIG)
