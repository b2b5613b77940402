"""Instance groups of Python models: counts, kinds and devices."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from core_requests import collect, send_request
from eventually import until
from google.protobuf import text_format
from repository_builder import IDENTITY_TENSORS, RepositoryBuilder
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.server.config import scheduling as server_gpus
from neso.server.config.model_config import complete_config
from neso.server.config.scheduling import available_gpus, instances_of
from neso.server.core import Core
from neso.server.options import ModelControlMode, ServerOptions


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """`gpus(2)` makes the driver report two GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(server_gpus, "_NVIDIA_GPUS", tmp_path / "gpus")

    def have(count: int) -> None:
        for index in range(count):
            (tmp_path / "gpus" / f"0000:0{index}:00.0").mkdir(parents=True)

    return have


async def reason(tmp_path, group: str) -> str:
    """Return why a model with this instance group cannot be loaded."""
    repository = RepositoryBuilder(tmp_path / "models")
    repository.add("model", config=f"{IDENTITY_TENSORS} instance_group {{ name: 'g' {group} }}")
    core = Core(ServerOptions((repository.path,)))
    await core.start()
    (entry,) = core.repository_index()
    await core.stop()
    return entry.reason


def test_instances_of_several_groups(gpus):
    gpus(3)
    text = """
        instance_group { name: "g" count: 2 kind: KIND_CPU }
        instance_group { name: "h" kind: KIND_MODEL }
        instance_group { name: "i" count: 2 kind: KIND_GPU gpus: [ 0, 2 ] }
        instance_group { name: "j" kind: KIND_GPU }
    """
    config = text_format.Parse(text, ModelConfig(name="m", backend="python"))
    complete_config(config, "m", Path())
    assert [(spec.name, spec.kind, spec.device) for spec in instances_of(config)] == [
        ("g_0", "CPU", 0), ("g_1", "CPU", 0), ("h_0", "MODEL", 0),
        ("i_0", "GPU", 0), ("i_1", "GPU", 0), ("i_2", "GPU", 2), ("i_3", "GPU", 2),
        ("j_0", "GPU", 0), ("j_1", "GPU", 1), ("j_2", "GPU", 2),
    ]  # fmt: skip


def test_gpu_numbers_follow_cuda_visible_devices(gpus, monkeypatch):
    gpus(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert available_gpus() == [0, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert available_gpus() == []


@pytest.mark.parametrize(
    ("count", "wrong", "message"),
    [
        (0, "kind: KIND_GPU", "instance group g of model model has kind KIND_GPU but no GPUs are available"),
        (
            0,
            "kind: KIND_GPU gpus: [ 0 ]",
            "specifies invalid or unsupported gpu id 0. GPUs that are available are: none",
        ),
        (
            2,
            "kind: KIND_GPU gpus: [ 0, 5 ]",
            "specifies invalid or unsupported gpu id 5. GPUs that are available are: 0, 1",
        ),
        (2, "kind: KIND_CPU gpus: [ 0 ]", "has kind KIND_CPU but specifies one or more GPUs"),
    ],
)
async def test_missing_gpus_fail_the_load(gpus, tmp_path, count, wrong, message):
    gpus(count)
    assert message in await reason(tmp_path, wrong)


async def test_models_get_instance_name_and_kind(serve):
    code = """
import json, time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.told = json.dumps([args["model_instance_name"], args["model_instance_kind"]])
        self.name = args["model_instance_name"]
    def execute(self, requests):
        folder = Path(pb_utils.get_model_dir())
        (folder / f"here_{self.name}").touch()
        end = time.monotonic() + 60
        while len(list(folder.glob("here_*"))) < 3:  # each of them shall execute one request
            assert time.monotonic() < end
            time.sleep(0.005)
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
    streams = [send_request(model, IN=np.ones(1, np.float32)) for _ in range(3)]
    reported = [json.loads((await collect(stream))[0].output("OUT").strings()[0]) for stream in streams]
    assert sorted(reported) == [["model_0_0", "CPU"], ["model_0_1", "CPU"], ["other_0", "MODEL"]]


async def test_count_of_a_group_on_several_gpus_changes_on_each_gpu(gpus, tmp_path):
    gpus(2)
    log = tmp_path / "log"
    code = f"""
from pathlib import Path

class TritonPythonModel:
    def initialize(self, args):
        self.device = args["model_instance_device_id"]
        self.write("+")
    def execute(self, requests):
        return [None]
    def finalize(self):
        self.write("-")
    def write(self, sign):
        with Path({str(log)!r}).open("a") as file:
            file.write(sign + self.device + "\\n")
"""

    def config(count: int) -> str:
        return f"{IDENTITY_TENSORS} instance_group {{ count: {count} kind: KIND_GPU gpus: [ 0, 1 ] }}"

    def instances_by_gpu() -> dict[str, int]:
        lines = log.read_text().split()
        return {gpu: lines.count(f"+{gpu}") - lines.count(f"-{gpu}") for gpu in ("0", "1")}

    repository = RepositoryBuilder(tmp_path / "models")
    repository.add("model", code, config(1))
    core = Core(
        ServerOptions(
            (repository.path,), model_control_mode=ModelControlMode.EXPLICIT, startup_models=("model",)
        )
    )
    await core.start()
    try:
        for count in (2, 1, 3):
            repository.configure("model", config(count))
            await core.load_model("model")
            await until(lambda count=count: instances_by_gpu() == {"0": count, "1": count})
    finally:
        await core.stop()
