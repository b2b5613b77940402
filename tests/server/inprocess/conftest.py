"""An in-process server with the standard models and a model that streams text."""

from __future__ import annotations

import pytest
from repository_builder import RepositoryBuilder

import neso

TEXT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            stream = pb_utils.get_input_tensor_by_name(request, "stream").as_numpy()[0]
            sender = request.get_response_sender()
            for part in text.split() if stream else [text]:
                out = pb_utils.Tensor("text_output", np.array([part], np.object_))
                sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TEXT_TENSORS = """
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""


@pytest.fixture
def models(tmp_path):
    repository = RepositoryBuilder(tmp_path / "models")
    repository.add_standard()
    repository.add("text", TEXT, TEXT_TENSORS)
    return repository


@pytest.fixture
def server(models):
    with neso.Server(model_repository=models.path, model_control_mode="explicit", startup_models=("*",),
                     exit_timeout=0.2) as server:  # fmt: skip
        yield server
