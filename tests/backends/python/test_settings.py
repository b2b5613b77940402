"""Settings of the Python backend."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.backends.python.description import PythonSettings
from neso.server.errors import InvalidArgument


def settings(parameters: dict[str, str] | None = None, **backend_config: str) -> PythonSettings:
    config = ModelConfig(name="m")
    for key, value in (parameters or {}).items():
        text_format.Parse(f"parameters {{ key: '{key}' value {{ string_value: '{value}' }} }}", config)
    return PythonSettings.from_config(
        config, {key.replace("_", "-"): value for key, value in backend_config.items()}
    )


def test_defaults():
    given = settings()
    assert (given.use_process, given.environment, given.stub_timeout) == (False, "", 30)
    assert (given.shm_default_size, given.shm_growth_size) == (1 << 20, 1 << 20)


def test_settings_are_parsed():
    given = settings(
        shm_default_byte_size="65536",
        shm_growth_byte_size="4096",
        shm_region_prefix_name="p",
        stub_timeout_seconds="5",
    )
    assert (given.shm_default_size, given.shm_growth_size) == (65536, 4096)
    assert (given.shm_name, given.stub_timeout) == ("p", 5)


@pytest.mark.parametrize(
    ("parameters", "backend_config", "use_process"),
    [
        ({"EXECUTION_MODE": "process"}, {}, True),
        ({}, {"execution_mode": "process"}, True),
        ({"EXECUTION_MODE": "thread"}, {"execution_mode": "process"}, False),
        ({"EXECUTION_ENV_PATH": "/e"}, {}, True),
        ({"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}, {}, False),
    ],
)
def test_model_parameter_overrides_the_backend_setting(parameters, backend_config, use_process):
    assert settings(parameters, **backend_config).use_process is use_process


@pytest.mark.parametrize(
    ("parameters", "backend_config", "message"),
    [
        (
            {"EXECUTION_MODE": "fork"},
            {},
            "unknown execution mode 'fork', expected 'thread' or 'process', for m",
        ),
        ({"EXECUTION_MODE": "thread", "EXECUTION_ENV_PATH": "/e"}, {}, "EXECUTION_ENV_PATH needs"),
        (
            {"FORCE_CPU_ONLY_INPUT_TENSORS": "maybe"},
            {},
            "Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: maybe",
        ),
        (
            {},
            {"shm_default_byte_size": "-1"},
            "shm-default-byte-size of the python backend must be an integer > 0",
        ),
        ({}, {"stub_timeout_seconds": "x"}, "stub-timeout-seconds"),
        ({}, {"shm_region_prefix_name": "x" * 300}, "shm-region-prefix-name"),
    ],
)
def test_invalid_settings_are_rejected(parameters, backend_config, message):
    with pytest.raises(InvalidArgument) as error:
        settings(parameters, **backend_config)
    assert message in error.value.message
