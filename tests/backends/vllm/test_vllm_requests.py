"""Parsing of requests to the vLLM backend, without vLLM."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from neso.backends.vllm.conversion import parse_sampling_values, to_vllm_sampling
from neso.backends.vllm.model_files import Adapters, ModelFiles, Supervision, UnknownAdapter
from neso.backends.vllm.tensors import EmbeddingRequest, TextRequest, read_request
from neso.generation import GuidedDecoding, InvalidParameter, SamplingParams
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.tensor import DataType, Tensor

TYPES: dict[str, Any] = {
    "n": int,
    "temperature": float,
    "max_tokens": int | None,
    "stop": str | list[str] | None,
    "stop_token_ids": list[int] | None,
    "ignore_eos": bool,
    "logprobs": int | None,
    "logit_bias": dict[int, float] | None,
}
FORM = frozenset({"json", "choice", "regex", "structural_tag"})


def request_of(parameters: dict[str, Any] | None = None, **inputs: Any) -> InferenceRequest:
    tensors = {}
    for name, value in {"text_input": "Hello", **inputs}.items():
        if isinstance(value, bool):
            tensors[name] = Tensor(name, DataType.BOOL, np.array([value]))
        else:
            tensors[name] = Tensor.from_strings(name, value if isinstance(value, list) else [value])
    return InferenceRequest("model", tensors, parameters=parameters or {})


def text_request(parameters: dict[str, Any] | None = None, **inputs: Any) -> TextRequest:
    read = read_request(request_of(parameters, **inputs))
    assert isinstance(read, TextRequest)
    return read


@pytest.mark.parametrize(
    ("inputs", "prepends"),
    [
        ({}, True),
        ({"exclude_input_in_output": False}, True),
        ({"exclude_input_in_output": True}, False),
        ({"stream": True}, False),
        ({"stream": True, "exclude_input_in_output": True}, False),
    ],
)
def test_exclude_input_in_output(inputs, prepends):
    assert text_request(**inputs).prepend_prompt is prepends


def test_stream_with_prompt_is_rejected():
    with pytest.raises(InvalidArgument) as caught:
        text_request(stream=True, exclude_input_in_output=False)
    assert caught.value.message == "When streaming, `exclude_input_in_output` = False is not allowed."


def test_sampling_parameters_tensor_overrides_request_parameters():
    read = text_request({"temperature": 0.5}, sampling_parameters='{"n": 2, "lora_name": "doll"}')
    assert (read.values, read.lora) == ({"n": 2}, "doll")
    assert text_request({"temperature": 0.5}).values == {"temperature": 0.5}


def test_requested_outputs_enable_logprobs():
    assert text_request(return_logprobs=True).values == {"logprobs": 1}
    assert text_request(return_cumulative_logprob=True).values == {"logprobs": 0}
    assert text_request({"logprobs": 5}, return_logprobs=True).values == {"logprobs": 5}
    assert text_request(return_logprobs=False).requested == frozenset()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"sampling_parameters": "{"}, "sampling_parameters: not valid JSON"),
        ({"sampling_parameters": "[1]"}, "sampling_parameters: must be a JSON object, got list"),
        ({"sampling_parameters": '{"lora_name": 3}'}, "lora_name: must be a string"),
        ({"embedding_request": "{}"}, "'input' must be a string or a list of token ids"),
        ({"embedding_request": '{"input": [true]}'}, "'input' must be"),
        (
            {"embedding_request": '{"input": "a", "pooling_params": {"dimensions": "8"}}'},
            "'dimensions' must be",
        ),
    ],
)
def test_invalid_requests_are_rejected(inputs, message):
    with pytest.raises(InvalidArgument, match=message.replace("[", r"\[")):
        read_request(request_of(**inputs))


@pytest.mark.parametrize("dimensions", [8, [8]])
def test_embedding_requests(dimensions):
    body = {"input": [1, 2], "pooling_params": {"dimensions": dimensions}}
    read = read_request(request_of(embedding_request=json.dumps(body), return_num_input_tokens=True))
    assert read == EmbeddingRequest([1, 2], 8, frozenset({"num_input_tokens"}))


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"temperature": "0", "max_tokens": "7"}, {"temperature": 0.0, "max_tokens": 7}),
        ({"ignore_eos": "true", "n": 2}, {"ignore_eos": True, "n": 2}),
        ({"stop": "END"}, {"stop": "END"}),
        ({"stop": '["a", "b"]'}, {"stop": ["a", "b"]}),
        ({"stop": "[not json"}, {"stop": "[not json"}),
        ({"stop_token_ids": "[1, 2]"}, {"stop_token_ids": [1, 2]}),
        ({"logit_bias": '{"5": 1.5}'}, {"logit_bias": {5: 1.5}}),
        ({"max_tokens": None}, {}),
        ({"structured_outputs": '{"choice": ["a"]}'}, {"structured_outputs": {"choice": ["a"]}}),
        ({"guided_decoding": {"regex": "a+"}}, {"guided_decoding": {"regex": "a+"}}),
        (
            {"structured_outputs": {"structural_tag": {"type": "x"}}},
            {"structured_outputs": {"structural_tag": '{"type":"x"}'}},
        ),
    ],
)
def test_values_are_converted_to_parameter_types(given, made):
    assert parse_sampling_values(given, TYPES, FORM) == made


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"temprature": 1}, "temprature"),
        ({"n": "two"}, "n"),
        ({"n": 1.5}, "n"),
        ({"stop_token_ids": "1"}, "stop_token_ids"),
        ({"structured_outputs": "{"}, "structured_outputs"),
        ({"structured_outputs": {"jsn": "x"}}, "structured_outputs"),
        ({"structured_outputs": 3}, "structured_outputs"),
    ],
)
def test_invalid_values_name_the_parameter(given, field):
    with pytest.raises(InvalidParameter) as caught:
        parse_sampling_values(given, TYPES, FORM)
    assert caught.value.field == field


def test_sampling_params_are_converted():
    params = SamplingParams(n=2, temperature=0.5, top_k=4, stop=("a",), logit_bias={3: 1.0}, max_tokens=9)
    values = to_vllm_sampling(params)
    assert (values["n"], values["temperature"], values["top_k"], values["max_tokens"]) == (2, 0.5, 4, 9)
    assert (values["stop"], values["logit_bias"]) == (["a"], {3: 1.0})
    assert "structured_outputs" not in values and "bad_words" not in values


@pytest.mark.parametrize(
    ("guided", "form"),
    [
        (GuidedDecoding(json={"type": "object"}), {"json": '{"type": "object"}'}),
        (GuidedDecoding(json=True), {"json_object": True}),
        (
            GuidedDecoding(json_object=True, disable_any_whitespace=True),
            {"json_object": True, "disable_any_whitespace": True},
        ),
        (GuidedDecoding(choice=("a", "b")), {"choice": ["a", "b"]}),
        (GuidedDecoding(regex="a+"), {"regex": "a+"}),
        (GuidedDecoding(grammar="root ::= 'a'"), {"grammar": "root ::= 'a'"}),
    ],
)
def test_guided_decoding_is_converted(guided, form):
    assert to_vllm_sampling(SamplingParams(guided_decoding=guided))["structured_outputs"] == form


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"beam_width": 2}, "beam_width"),
        ({"best_of": 3}, "best_of"),
        ({"stop_words": ((1, 2),)}, "stop_words"),
        ({"top_p_decay": 0.5}, "top_p_decay"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"return_context_logits": True}, "return_context_logits"),
        ({"bad_words": ((1, 2),)}, "bad_words"),
    ],
)
def test_unsupported_parameters_are_rejected(params, field):
    with pytest.raises(InvalidParameter) as caught:
        to_vllm_sampling(SamplingParams(**params))
    assert caught.value.field == field


def test_shown_special_tokens_disable_skipping():
    assert to_vllm_sampling(SamplingParams())["skip_special_tokens"]
    assert not to_vllm_sampling(SamplingParams(shown_special_tokens=("<tool_call>",)))["skip_special_tokens"]


def test_best_of_equal_to_n_is_accepted():
    assert "best_of" not in to_vllm_sampling(SamplingParams(n=2, best_of=2))


def test_adapter_registry_and_error_messages():
    adapters = Adapters(lambda *fields: fields, {"doll": "/a", "sheep": "/b"}, enabled=True)
    assert adapters.find("doll") == ("doll", 1, "/a")
    with pytest.raises(UnknownAdapter) as caught:
        adapters.find("charizard")
    assert str(caught.value) == "LoRA charizard is not supported, we currently support ['doll', 'sheep']"
    assert adapters.put("doll", "/c") == (
        "doll",
        3,
        "/c",
    )  # a different id, by which vLLM identifies adapters
    with pytest.raises(UnknownAdapter, match=r"^LoRA feature is not enabled\.$"):
        Adapters(lambda *fields: fields, {"doll": "/a"}, enabled=False).find("doll")


def test_model_files(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "model.json").write_text('{"model": "checkpoint", "max_model_len": 8}')
    (tmp_path / "multi_lora.json").write_text('{"near": "adapter", "far": "/elsewhere"}')
    files = ModelFiles.read(tmp_path)
    assert files.arguments == {"model": str(tmp_path / "checkpoint"), "max_model_len": 8}
    assert files.adapters == {"near": str(tmp_path / "adapter"), "far": "/elsewhere"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "there is no model.json"),
        ({"model.json": "{"}, "model.json: not valid JSON"),
        ({"model.json": "[]"}, "model.json: must hold a JSON object"),
        ({"model.json": "{}", "multi_lora.json": '{"a": 1}'}, "multi_lora.json: the path of 'a'"),
    ],
)
def test_invalid_model_files_are_rejected(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        ModelFiles.read(tmp_path)


@pytest.mark.parametrize("name", ["auto", "vllm", "defaults", "elsewhere/defaults"])
def test_generation_config_path_is_resolved(tmp_path, name):
    (tmp_path / "defaults").mkdir()
    (tmp_path / "model.json").write_text(json.dumps({"model": "m", "generation_config": name}))
    found = ModelFiles.read(tmp_path).arguments["generation_config"]
    assert found == (str(tmp_path / "defaults") if name == "defaults" else name)


def test_supervision_options_are_no_engine_arguments(tmp_path):
    given = {"model": "m", "max_restarts": 3, "restart_window": 60, "step_timeout": 5.5}
    (tmp_path / "model.json").write_text(json.dumps(given))
    files = ModelFiles.read(tmp_path)
    assert files.arguments == {"model": "m"}
    assert files.supervision == Supervision(3, 60, 5.5)


@pytest.mark.parametrize(
    "option", [{"max_restarts": 1.5}, {"restart_window": "60"}, {"step_timeout": True}, {"max_restarts": -1}]
)
def test_invalid_supervision_options_are_rejected(tmp_path, option):
    (tmp_path / "model.json").write_text(json.dumps({"model": "m", **option}))
    with pytest.raises(InvalidArgument, match=f"'{next(iter(option))}' must be"):
        ModelFiles.read(tmp_path)


def test_checkpoint_in_the_version_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert ModelFiles.read(tmp_path).arguments == {"model": str(tmp_path)}
