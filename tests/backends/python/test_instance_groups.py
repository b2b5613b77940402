"""Instance groups of Python models: counts, kinds and devices."""

from __future__ import annotations

import json

import numpy as np
import pytest
from core_requests import ask, collect
from repository_builder import IDENTITY_TENSORS, RepositoryBuilder

from neso.backends.python import instance_groups
from neso.backends.python.instance_groups import available_gpus, expand_groups
from neso.server.core import Core
from neso.server.errors import InvalidArgument
from neso.server.options import ServerOptions


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """`gpus(2)`: the driver knows that many."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(instance_groups, "_NVIDIA_GPUS", tmp_path / "gpus")

    def have(count: int) -> None:
        for index in range(count):
            (tmp_path / "gpus" / f"0000:0{index}:00.0").mkdir(parents=True)

    return have


def group(kind: str = "CPU", count: int = 1, gpus: tuple[int, ...] = (), name: str = "g") -> dict:
    return {"name": name, "kind": f"KIND_{kind}", "count": count, "gpus": list(gpus)}


def places(*groups: dict) -> list[tuple[str, str, str]]:
    names = ("model_instance_name", "model_instance_kind", "model_instance_device_id")
    return [tuple(place[name] for name in names) for place in expand_groups(groups, "m")]


def test_groups_add_up(gpus):
    gpus(3)
    assert places(group(count=2), group("MODEL", name="h")) == [
        ("g_0", "CPU", "0"), ("g_1", "CPU", "0"), ("h_0", "MODEL", "0"),
    ]  # fmt: skip
    assert places(group("GPU", 2, (0, 2))) == [
        ("g_0", "GPU", "0"), ("g_0", "GPU", "2"), ("g_1", "GPU", "0"), ("g_1", "GPU", "2"),
    ]  # fmt: skip
    assert [place[2] for place in places(group("GPU"))] == ["0", "1", "2"]


def test_cuda_numbers_what_it_sees(gpus, monkeypatch):
    gpus(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert available_gpus() == [0, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert available_gpus() == []


@pytest.mark.parametrize(
    ("count", "wrong", "message"),
    [
        (0, group("GPU"), "instance group g of model m has kind KIND_GPU but no GPUs are available"),
        (
            0,
            group("GPU", gpus=(0,)),
            "specifies invalid or unsupported gpu id 0. GPUs that are available are: none",
        ),
        (
            2,
            group("GPU", gpus=(0, 5)),
            "specifies invalid or unsupported gpu id 5. GPUs that are available are: 0, 1",
        ),
        (2, group("CPU", gpus=(0,)), "has kind KIND_CPU but specifies one or more GPUs"),
    ],
)
def test_gpus_that_there_are_not(gpus, count, wrong, message):
    gpus(count)
    with pytest.raises(InvalidArgument) as error:
        expand_groups([wrong], "m")
    assert message in error.value.message


async def test_a_gpu_that_there_is_not_fails_the_load(gpus, tmp_path):
    repository = RepositoryBuilder(tmp_path / "models")
    repository.add("model", config=IDENTITY_TENSORS + "instance_group { kind: KIND_GPU gpus: [ 0 ] }")
    core = Core(ServerOptions((repository.path,)))
    await core.start()
    (entry,) = core.repository_index()
    assert "invalid or unsupported gpu id 0" in entry.reason
    await core.stop()


async def test_models_are_told_of_their_place(serve):
    code = """
import json, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.told = json.dumps([args["model_instance_name"], args["model_instance_kind"]])
    def execute(self, requests):
        time.sleep(0.1)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([self.told], np.object_))])]
"""
    model = await serve(
        code,
        """
        input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
        output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
        instance_group { count: 2 kind: KIND_CPU }
        instance_group { name: "other" kind: KIND_MODEL }
        """,
    )
    streams = [ask(model, IN=np.ones(1, np.float32)) for _ in range(3)]
    told = [json.loads((await collect(stream))[0].output("OUT").strings()[0]) for stream in streams]
    assert sorted(told) == [["model_0_0", "CPU"], ["model_0_1", "CPU"], ["other_0", "MODEL"]]
