"""Model repositories for tests, with Python models."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests
        ]
"""

IDENTITY_TENSORS = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""

CONSTANT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        out = np.array([{value}], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]) for _ in requests]
"""

REPEAT = """
import json, threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            sender = request.get_response_sender()
            threading.Thread(target=self.answer, args=(sender, count)).start()

    def answer(self, sender, count):
        for i in range(count):
            out = pb_utils.Tensor("OUT", np.array([i], np.int32))
            sender.send(pb_utils.InferenceResponse([out]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

REPEAT_TENSORS = """
input { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""

SLOW = """
import time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Answers when the file `go` exists beside it, or says CANCELLED when the client has cancelled.

    Writes the file `begun` when it has a request.
    '''

    def execute(self, requests):
        (request,) = requests
        (Path(pb_utils.get_model_dir()) / "begun").touch()
        go = Path(pb_utils.get_model_dir()) / "go"
        while not go.exists():
            if request.is_cancelled():
                error = pb_utils.TritonError("seen", pb_utils.TritonError.CANCELLED)
                return [pb_utils.InferenceResponse(error=error)]
            time.sleep(0.005)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])]
"""


class RepositoryBuilder:
    """Writes models into a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        name: str,
        code: str = IDENTITY,
        config: str = IDENTITY_TENSORS,
        versions: tuple[str, ...] = ("1",),
    ) -> Path:
        """Write or overwrite a Python model; return its folder."""
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        self.configure(name, config)
        for version in versions:
            (folder / version).mkdir(exist_ok=True)
            (folder / version / "model.py").write_text(dedent(code))
        return folder

    def configure(self, name: str, config: str) -> None:
        """Write a model's configuration without changing its code."""
        (self.path / name / "config.pbtxt").write_text('backend: "python"\n' + dedent(config))

    def add_constant(self, name: str, value: float, **extra: Any) -> Path:
        """Add a model that always returns the same number."""
        return self.add(name, CONSTANT.format(value=value), **extra)

    def add_ensemble(self, name: str, step: str) -> Path:
        """Add an ensemble with a single step, a model like IDENTITY."""
        folder = self.path / name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        maps = "input_map { key: 'IN' value: 'IN' } output_map { key: 'OUT' value: 'OUT' }"
        scheduling = f"ensemble_scheduling {{ step {{ model_name: '{step}' model_version: -1 {maps} }} }}"
        (folder / "config.pbtxt").write_text(f'platform: "ensemble" {IDENTITY_TENSORS} {scheduling}')
        return folder

    def add_standard(self) -> None:
        """Add identity, repeat (decoupled) and slow."""
        self.add("identity")
        self.add("repeat", REPEAT, REPEAT_TENSORS)
        self.add("slow", SLOW)
