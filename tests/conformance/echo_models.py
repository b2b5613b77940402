"""A repository of Python models whose output Y is their input X."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DECOUPLED_RESPONSES = 3
CODE = """
import triton_python_backend_utils as pb_utils


def echo(request):
    values = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", values)])


class TritonPythonModel:
    def execute(self, requests):
        return [echo(request) for request in requests]
"""
DECOUPLED_CODE = f"""
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range({DECOUPLED_RESPONSES}):
                sender.send(echo(request))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
MODELS = {
    "fixed": ("FP32", "4, 8", ""),
    "variable": ("FP16", "-1, 8", "max_batch_size: 8 dynamic_batching {}"),
    "strings": ("STRING", "1", "max_batch_size: 4"),
    "decoupled": ("INT32", "1", "model_transaction_policy { decoupled: true }"),
}
"""Data type and shape of X and Y, and further configuration."""


def write_models(
    repository: Path, models: Mapping[str, tuple[str, str, str]], methods: Mapping[str, str]
) -> None:
    """Write the models. `methods`: code that replaces `execute` of a model, by name."""
    for name, (datatype, dims, others) in models.items():
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        tensor = f"data_type: TYPE_{datatype} dims: [{dims}]"
        (folder.parent / "config.pbtxt").write_text(
            f'backend: "python" input {{ name: "X" {tensor} }} output {{ name: "Y" {tensor} }} {others}'
        )
        (folder / "model.py").write_text(CODE + methods.get(name, ""))
