"""Models of the soak test."""

from __future__ import annotations

import json
from pathlib import Path

ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests
        ]
"""
VECTOR = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
REPEAT = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            threading.Thread(target=self.answer, args=(request.get_response_sender(), count)).start()

    def answer(self, sender, count):
        for i in range(count):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([i], np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SUM = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            total = inputs["SUM"] + inputs["IN"]
            outputs = [pb_utils.Tensor("OUT", total), pb_utils.Tensor("NEXT", total)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
# Returns its process id; a negative input ends the process.
CRASHER = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            if pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0] < 0:
                os._exit(3)
        pid = pb_utils.Tensor("OUT", np.array([os.getpid()], np.int32))
        return [pb_utils.InferenceResponse([pid]) for _ in requests]
"""

_MODELS = {
    "echo": (ECHO, VECTOR),
    "vanishing": (ECHO, VECTOR),
    "shared": (ECHO, VECTOR),
    "spare": (ECHO, VECTOR),
    "batched": (ECHO, "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 1000 }" + VECTOR),
    "repeat": (
        REPEAT,
        """
        input { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }
        output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
        model_transaction_policy { decoupled: true }
        """,
    ),
    "sum": (
        SUM,
        """
        max_batch_size: 4
        input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
        output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
        sequence_batching {
          max_sequence_idle_microseconds: 60000000  # on a busy machine a second passes between two requests
          state { input_name: "SUM" output_name: "NEXT" data_type: TYPE_INT32 dims: [ 1 ] }
        }
        """,
    ),
    "crasher": (
        CRASHER,
        """
        input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
        output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
        parameters { key: "EXECUTION_MODE" value { string_value: "process" } }
        """,
    ),
}
_PIPELINE = """
platform: "ensemble"
max_batch_size: 8
%s
ensemble_scheduling {
  step [
    { model_name: "batched" model_version: -1
      input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "between" } },
    { model_name: "batched" model_version: -1
      input_map { key: "IN" value: "between" } output_map { key: "OUT" value: "OUT" } }
  ]
}
"""


GUEST_BLOCKS = 256
ENGINES = {"pilot": 512, "cancelled": 512, "guest": GUEST_BLOCKS}
"""Language models and the sizes of their caches."""


def write_repository(folder: Path) -> None:
    """Write Python models, an ensemble, and the language model of the package as `ENGINES`."""
    for name, (code, config) in _MODELS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text('backend: "python"\n' + config)
        (folder / name / "1" / "model.py").write_text(code)
    for name, config in (("pipeline", _PIPELINE % VECTOR), *((name, 'backend: "llm"') for name in ENGINES)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
    for name, num_blocks in ENGINES.items():
        # A stopped engine is found within seconds, and kills are more frequent in a short run than by default allowed.
        limits = {"heartbeat_timeout": 5, "max_restarts": 100}
        options = {"model": "neso-pilot", "num_blocks": num_blocks, **limits}
        (folder / name / "1" / "model.json").write_text(json.dumps(options))
