"""Fixtures: cores that serve one model `tensorrt_llm`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "engine"))
sys.path.insert(0, str(Path(__file__).parent))

from checkpoints import make_checkpoint
from trtllm_repository import NAME, PROMPT, write_model

from neso.engine.client.llm import LLM
from neso.generation import SamplingParams
from neso.server.core import Core
from neso.server.inference_request import InferenceRequest
from neso.server.options import ServerOptions
from neso.server.tensor import Tensor

Outputs = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


class Served:
    """A core with one model. `reason` is why it is not ready, "" if it is."""

    def __init__(self, core: Core) -> None:
        self.core = core

    @property
    def reason(self) -> str:
        (entry,) = self.core.repository_index()
        return entry.reason

    @property
    def backend(self) -> Any:
        return self.core.model(NAME)._backend

    async def responses(
        self, inputs: Outputs, id: str = "", parameters: dict[str, Any] | None = None
    ) -> list[Outputs]:
        """Return the responses to a request; an error is raised."""
        tensors = {name: Tensor.from_numpy(name, array) for name, array in inputs.items()}
        found = []
        request = InferenceRequest(NAME, tensors, id=id, parameters=parameters or {})
        async for response in self.core.model(NAME).submit(request):
            if response.error is not None:
                raise response.error
            found.append({tensor.name: tensor.array for tensor in response.outputs})
        return found

    async def tokens(self, prompt: list[int] = PROMPT, length: int = 8, **further: Any) -> list[int]:
        """Return the new tokens of a request with one response."""
        inputs = {
            "input_ids": np.array([prompt], np.int32),
            "input_lengths": np.array([len(prompt)], np.int32)[np.newaxis],
            "request_output_len": np.array([[length]], np.int32),
            "exclude_input_in_output": np.array([[True]]),
        }
        (response,) = await self.responses(inputs | further)
        tokens: list[int] = response["output_ids"][0, 0].tolist()
        return tokens


ServeModel = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve_model(tmp_path: Path, checkpoint: Path) -> AsyncIterator[ServeModel]:
    """`await serve_model(parameter=value, ...)`: other arguments as `write_model`. The engine runs in this process."""
    cores: list[Core] = []

    async def serve(model: Path | str = checkpoint, **options: Any) -> Served:
        root = tmp_path / f"models{len(cores)}"
        write_model(root, model, **options)
        core = Core(ServerOptions((root,), backend_config={"tensorrtllm": {"in-process": "true"}}))
        cores.append(core)
        await core.start()
        return Served(core)

    yield serve
    for core in cores:
        await core.stop()


@pytest.fixture(scope="session")
def greedy(checkpoint: Path) -> Callable[..., list[int]]:
    """`greedy(prompt, length, **sampling)` returns the tokens of the engine without a server."""
    llm = LLM(checkpoint)

    def generate(prompt: list[int] = PROMPT, length: int = 8, **params: Any) -> list[int]:
        params = {"temperature": 0, "max_tokens": length, "ignore_eos": True, **params}
        (result,) = llm.generate([prompt], SamplingParams(**params), progress=False)
        return result.outputs[0].token_ids

    return generate
