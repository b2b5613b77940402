"""Orchestrator mode: number of devices, and the devices and CPUs of each model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.backends.llm.orchestrator_mode import with_own_devices
from neso.cli.orchestrator_mode import num_devices, read_config
from neso.engine.config import EngineConfig
from neso.server.backend import ModelContext
from neso.server.device_claims import DeviceClaims
from neso.server.errors import InvalidArgument


def model(count: int = 1, **parameters: str) -> ModelConfig:
    config = ModelConfig(backend="tensorrtllm")
    config.instance_group.add(count=count)
    for name, value in parameters.items():
        config.parameters[name].string_value = value
    return config


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([], 1),
        ([model()], 1),
        ([model(), model()], 2),
        ([model(gpu_device_ids="0,1"), model(gpu_device_ids="2,3")], 4),
        ([model(count=2, gpu_device_ids="0,1;2,3")], 4),
        ([model(count=2, tensor_parallel_size="2", pipeline_parallel_size="2")], 8),
        ([model(gpu_device_ids="3"), model()], 5),
        ([model(gpu_device_ids="${gpu_device_ids}")], 1),
    ],
)
def test_number_of_devices(models, expected):
    assert num_devices(models) == expected


def test_only_language_models_have_devices(tmp_path):
    path = tmp_path / "config.pbtxt"
    for text, found in [('backend: "tensorrtllm"', True), ('backend: "python"', False), ("{", False)]:
        path.write_text(text)
        assert (read_config(path) is not None) == found
    path.write_text('backend: "${triton_backend}"')
    assert read_config(path) is not None
    assert read_config(tmp_path / "absent") is None


def context(name: str, core: Any, devices: int = 4) -> ModelContext:
    return cast(
        ModelContext, SimpleNamespace(name=name, core=core, backend_config={"cpu-devices": str(devices)})
    )


def place(
    name: str, core: Any, count: int = 1, gpus: tuple[str, ...] = (), owner: object = None, **options: object
):
    config = EngineConfig.from_options("model", options)
    return with_own_devices(config, context(name, core), owner or name, count, gpus)


@pytest.fixture
def core(monkeypatch) -> Any:
    monkeypatch.setattr(
        "neso.backends.llm.orchestrator_mode.split_cpus", lambda n: [[i, i + n] for i in range(n)]
    )
    return SimpleNamespace(devices=DeviceClaims())


def test_device_numbers_are_parts_of_the_cpus(core):
    assert place("a", core, device_ids="0,1").cpus == "0-1,4-5"
    assert place("b", core, count=2, device_ids="2;3").cpus == "2,6;3,7"


def test_models_without_numbers_get_unused_parts(core):
    assert place("a", core, device_ids="1").cpus == "1,5"
    assert place("b", core, count=2).cpus == "0,4;2,6"
    assert place("c", core).cpus == "3,7"
    core.devices.release("b")
    assert place("d", core).cpus == "0,4"


def test_gpus_are_assigned_instead_of_cpus(core):
    placed = place("a", core, gpus=("0", "1"))
    assert (placed.device_ids, placed.cpus) == ("0", None)
    assert place("b", core, gpus=("0", "1")).device_ids == "1"


def test_overlap_is_logged(core, caplog):
    place("a", core, device_ids="0,1")
    place("a", core, owner="reloaded", device_ids="0,1")
    assert "uses devices" not in caplog.text
    place("b", core, device_ids="1,2")
    assert "model 'b' uses devices of model 'a'" in caplog.text


def test_missing_device_is_an_error(core):
    with pytest.raises(InvalidArgument, match="device 4 does not exist, the highest number is 3"):
        place("a", core, device_ids="4")


def test_given_cpus_are_kept(core):
    assert place("a", core, cpus="0").cpus == "0"
