"""Completion of configurations without a backend, and comparison of instance groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.server.config.model_config import (
    check_config,
    complete_batching,
    complete_config,
    config_from_json,
    differ_in_instances_only,
    read_config,
    string_parameter,
)
from neso.server.errors import InvalidArgument


def parse(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


@pytest.mark.parametrize(
    ("config", "name", "file", "backend"),
    [
        ("backend: 'other'", "m.python", "model.py", "other"),
        ("platform: 'onnxruntime_onnx'", "m", "model.py", "onnxruntime"),
        ("platform: 'pytorch_libtorch'", "m", None, "pytorch"),
        ("default_model_filename: 'model.onnx'", "m", "model.py", "onnxruntime"),
        ("", "m", "model.py", "python"),
        ("", "m", "model.onnx", "onnxruntime"),
        ("", "m", "model.plan", "tensorrt"),
        ("", "m.python", "model.pt", "pytorch"),
        ("", "my.llm", None, "llm"),
    ],
)
def test_backends_are_inferred(
    tmp_path: Path, config: str, name: str, file: str | None, backend: str
) -> None:
    if file:
        (tmp_path / file).touch()
    message = parse(config)
    complete_config(message, name, tmp_path)
    assert message.backend == backend


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            "",
            r"Could not determine backend for model 'm' with no backend in model configuration. Expected model name "
            r"of the form 'model.<backend_name>'",
        ),
        ("platform: 'caffe'", "unexpected platform type 'caffe' for m"),
    ],
)
def test_backend_inference_errors(tmp_path: Path, config: str, reason: str) -> None:
    message = parse(config)
    complete_config(message, "m", tmp_path)
    with pytest.raises(InvalidArgument, match=reason):
        check_config(message, "m")


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ("max_batch_size: 8 dynamic_batching {}", [8]),
        ("max_batch_size: 8 dynamic_batching { preferred_batch_size: [2, 4] }", [2, 4]),
        ("max_batch_size: 8 sequence_batching { oldest {} }", [8]),
        ("max_batch_size: 8 sequence_batching { oldest { preferred_batch_size: 2 } }", [2]),
        ("dynamic_batching {}", []),
    ],
)
def test_preferred_batch_size_defaults_to_max_batch_size(config: str, sizes: list[int]) -> None:
    message = parse(config)
    complete_batching(message)
    batcher = message.sequence_batching.oldest if "oldest" in config else message.dynamic_batching
    assert list(batcher.preferred_batch_size) == sizes


def test_preferred_batch_size_is_not_set_without_a_batcher() -> None:
    message = parse("max_batch_size: 8 sequence_batching { direct {} }")
    complete_batching(message)
    assert message == parse("max_batch_size: 8 sequence_batching { direct {} }")


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("", True),
        ("instance_group { count: 4 }", True),
        ("version_policy { all { } }", True),
        ("max_batch_size: 1", False),
        ("parameters { key: 'a' value { string_value: 'b' } }", False),
    ],
)
def test_instance_group_differences(other: str, same: bool) -> None:
    assert differ_in_instances_only(parse("name: 'm'"), parse("name: 'm' " + other)) is same


@pytest.mark.parametrize("filename", ["../../../x.py", "/etc/x.py", "a/../../x.py", "x\\000.py"])
@pytest.mark.parametrize(
    "field", ["default_model_filename: '{}'", "cc_model_filenames {{ key: '7.5' value: '{}' }}"]
)
def test_file_names_must_stay_inside_the_version_folder(tmp_path: Path, field: str, filename: str) -> None:
    message = parse("name: 'm' backend: 'python' " + field.format(filename))
    complete_config(message, "m", tmp_path)
    with pytest.raises(InvalidArgument, match="must stay inside the version folder of model 'm'"):
        check_config(message, "m")


def test_file_in_a_folder_of_the_version_is_accepted(tmp_path: Path) -> None:
    message = parse("name: 'm' backend: 'python' default_model_filename: 'code/model.py'")
    complete_config(message, "m", tmp_path)
    check_config(message, "m")


def test_integers_out_of_range_are_invalid(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text("max_batch_size: 99999999999999999999999")
    with pytest.raises(InvalidArgument, match="failed to read text proto"):
        read_config(tmp_path)
    with pytest.raises(InvalidArgument, match="failed to parse the model configuration"):
        config_from_json('{"max_batch_size": 99999999999999999999999}')


def test_repeated_fields_of_json_can_be_single_values() -> None:
    single = """{
        "input": {"name": "IN", "dataType": "TYPE_FP32", "dims": 4},
        "instanceGroup": {"count": 2, "gpus": 0},
        "model_warmup": {"name": "w", "inputs": {"IN": {"dims": 4}}},
        "output": null
    }"""
    lists = """{
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [4]}],
        "instance_group": [{"count": 2, "gpus": [0]}],
        "model_warmup": [{"name": "w", "inputs": {"IN": {"dims": [4]}}}]
    }"""
    assert config_from_json(single) == config_from_json(lists)
    assert config_from_json(lists).model_warmup[0].inputs["IN"].dims == [4]


@pytest.mark.parametrize("text", ['{"input": "IN"}', '{"parameters": []}', '{"max_batch_size": [1]}'])
def test_wrong_types_of_json_are_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument, match="failed to parse the model configuration"):
        config_from_json(text)


def test_reading_a_parameter_does_not_insert_it() -> None:
    config = ModelConfig()
    config.parameters["given"].string_value = "1"
    assert string_parameter(config, "given") == "1"
    assert string_parameter(config, "missing") == ""
    assert string_parameter(config, "missing", "auto") == "auto"
    assert list(config.parameters) == ["given"]
