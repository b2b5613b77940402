"""An identity model that runs on the core's event loop, for benchmarks of everything except the model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neso.server.backend import BUILTIN, Backend
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.tensor import Tensor

CONFIG = """
backend: "bench_identity"
input { name: "INPUT" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUTPUT" data_type: TYPE_FP32 dims: [-1] }
"""


class Identity(Backend):
    """Returns its input."""

    async def load(self) -> None:
        pass

    async def unload(self) -> None:
        pass

    def submit(self, request: ResponseStream) -> None:
        tensor = request.request.inputs["INPUT"]
        output = Tensor("OUTPUT", tensor.datatype, tensor.array)
        request.send(InferenceResponse("identity", "1", outputs=[output]), final=True)


@contextmanager
def identity_repository() -> Iterator[Path]:
    """Create a repository with the model `identity`, which only this process can serve."""
    BUILTIN["bench_identity"] = f"{__name__}:Identity"
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        (repository / "identity" / "1").mkdir(parents=True)
        (repository / "identity" / "config.pbtxt").write_text(CONFIG)
        yield repository
