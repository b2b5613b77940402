"""Python-based backends: one `model.py` in the backend directory for many models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from core_requests import collect, send_request

from neso.server.core import Core
from neso.server.options import ServerOptions

SCALE = """
from pathlib import Path
import triton_python_backend_utils as pb_utils
from factors import read

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        assert Path(pb_utils.get_model_dir()).name == "1"
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
        return config

    def initialize(self, args):
        self.factor = read(Path(pb_utils.get_model_dir()))

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy() * self.factor)])
            for r in requests
        ]
"""
FACTORS = "def read(folder):\n    return int((folder / 'factor').read_text())\n"

Start = Callable[..., Awaitable[Core]]


@pytest.fixture
async def start(tmp_path: Path, python_options: dict[str, dict[str, str]]) -> AsyncIterator[Start]:
    """`await start(scaled=3)` returns a core with models of the backend `scale`, by their factors."""
    cores: list[Core] = []

    async def run(backend: str = "scale", **factors: int) -> Core:
        folder = tmp_path / "backends" / "scale"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(SCALE)
        (folder / "factors.py").write_text(FACTORS)
        for name, factor in factors.items():
            version = tmp_path / "models" / name / "1"
            version.mkdir(parents=True)
            (version / "factor").write_text(str(factor))
            (version.parent / "config.pbtxt").write_text(f'backend: "{backend}"')
        options = ServerOptions(
            (tmp_path / "models",),
            exit_timeout=1,
            backend_config=python_options,
            backend_directory=tmp_path / "backends",
        )
        cores.append(core := Core(options))
        await core.start()
        return core

    yield run
    for core in cores:
        await core.stop()


async def test_models_share_the_file_of_their_backend(start: Start, execution_mode: str) -> None:
    core = await start(double=2, triple=3)
    for name, factor in (("double", 2), ("triple", 3)):
        model = core.model(name)
        assert model.config.backend == "scale"
        (response,) = await asyncio.wait_for(collect(send_request(model, IN=np.array([5], np.float32))), 60)
        assert response.error is None, response.error
        assert response.output("OUT").array.tolist() == [5 * factor]


@pytest.mark.parametrize("backend", ["nope", "../backends/scale", "scale/../scale", "/scale"])
async def test_names_outside_the_backend_directory_are_not_found(start: Start, backend: str) -> None:
    core = await start(backend=backend, one=1)
    (entry,) = core.repository_index()
    assert f"unable to find backend '{backend}'" in entry.reason
