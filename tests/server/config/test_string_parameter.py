"""String parameters of a configuration."""

from __future__ import annotations

from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.server.config.model_config import string_parameter


def test_reading_a_parameter_does_not_insert_it() -> None:
    config = ModelConfig()
    config.parameters["given"].string_value = "1"
    assert string_parameter(config, "given") == "1"
    assert string_parameter(config, "missing") == ""
    assert string_parameter(config, "missing", "auto") == "auto"
    assert list(config.parameters) == ["given"]
