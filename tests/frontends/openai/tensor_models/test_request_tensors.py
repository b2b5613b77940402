"""Requests as input tensors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.backends.vllm.conversion import to_vllm_sampling
from neso.frontends.openai.tensor_models.input_tensors import sampling_json
from neso.frontends.openai.tensor_models.language_model import to_parameter_error
from neso.frontends.openai.tensor_models.request_tensors import (
    request_tensors,
    requested_outputs,
    unsupported_reason,
)
from neso.generation import (
    GenerationRequest,
    GuidedDecoding,
    InvalidParameter,
    LoraRequest,
    SamplingParams,
)
from neso.server.errors import InternalError, InvalidArgument
from neso.server.signature import Signature

TEXT = """
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
"""


def signature(more: str = "") -> Signature:
    return Signature(text_format.Parse(f'name: "m" {TEXT} {more}', ModelConfig()))


def declared(name: str, data_type: str, dims: str = "1", optional: bool = True) -> str:
    return f'input {{ name: "{name}" data_type: TYPE_{data_type} dims: [ {dims} ] optional: {str(optional).lower()} }} '


def tensors(more: str, sampling: SamplingParams | None = None, **request: Any) -> dict[str, Any]:
    """The inputs except text_input, as lists."""
    sampling = sampling or SamplingParams()
    made = request_tensors(
        signature(more), GenerationRequest("hello", **request), "hello", sampling, stream=False
    )
    assert made.pop("text_input").strings() == ["hello"]
    return {
        name: tensor.strings() if tensor.datatype == "BYTES" else tensor.array.tolist()
        for name, tensor in made.items()
    }


def refused(more: str, sampling: SamplingParams | None = None, **request: Any) -> str:
    with pytest.raises(InvalidParameter) as error:
        tensors(more, sampling, **request)
    return error.value.field


def test_only_declared_inputs_are_sent() -> None:
    assert tensors("") == {}
    assert tensors(declared("max_tokens", "INT32"), SamplingParams(max_tokens=5)) == {"max_tokens": [5]}
    assert tensors("", SamplingParams(max_tokens=5)) == {}


def test_batching_models_get_a_batch_of_one() -> None:
    more = "max_batch_size: 2 " + declared("temperature", "FP32") + declared("stop_words", "STRING", "-1")
    made = request_tensors(
        signature(more), GenerationRequest("hi"), "hi", SamplingParams(stop=("a", "b")), stream=False
    )
    assert made["text_input"].shape == (1, 1)
    assert made["temperature"].array.tolist() == [[1.0]]
    assert made["temperature"].array.dtype == np.float32
    assert made["stop_words"].shape == (1, 2)


def test_multidimensional_shapes() -> None:
    config = """
    input { name: "text_input" data_type: TYPE_STRING dims: [ 1, 1 ] }
    input { name: "stream" data_type: TYPE_BOOL dims: [ 1, 1 ] }
    input { name: "stop_words" data_type: TYPE_STRING dims: [ -1, -1 ] optional: true }
    input { name: "temperature" data_type: TYPE_FP32 dims: [ ] optional: true }
    output { name: "text_output" data_type: TYPE_STRING dims: [ 1, -1 ] }
    """
    made = Signature(text_format.Parse(f'name: "m" {config}', ModelConfig()))
    assert unsupported_reason(made) == ""
    sampling = SamplingParams(stop=("a", "b"))
    inputs = request_tensors(made, GenerationRequest("hi"), "hi", sampling, stream=True)
    shapes = {name: tensor.shape for name, tensor in inputs.items()}
    assert shapes == {"text_input": (1, 1), "stream": (1, 1), "stop_words": (1, 2), "temperature": ()}


def test_prompt_embeds_are_rejected() -> None:
    assert refused("", prompt_embeds=np.zeros((2, 4))) == "prompt_embeds"


@pytest.mark.parametrize("name", ["seed", "random_seed", "sampling_param_seed"])
def test_input_name_aliases(name: str) -> None:
    assert tensors(declared(name, "UINT64"), SamplingParams(seed=3)) == {name: [3]}
    assert tensors(declared(name, "UINT64"), SamplingParams(seed=-1)) == {name: [2**64 - 1]}


def test_trtllm_llm_api_inputs() -> None:
    more = "".join(
        (
            declared("streaming", "BOOL"),
            declared("sampling_param_max_tokens", "INT32"),
            declared("sampling_param_temperature", "FP32"),
            declared("sampling_param_stop", "STRING"),
            declared("sampling_param_exclude_input_from_output", "BOOL"),
            declared("stop", "BOOL"),
            declared("lora_name", "STRING"),
        )
    )
    sampling = SamplingParams(max_tokens=5, temperature=0.5, stop=("x",))
    assert tensors(more, sampling, lora=LoraRequest(name="mine")) == {
        "streaming": [False],
        "sampling_param_max_tokens": [5],
        "sampling_param_temperature": [0.5],
        "sampling_param_stop": ["x"],
        "sampling_param_exclude_input_from_output": [True],
        "lora_name": ["mine"],
    }


def test_required_inputs_get_neutral_values() -> None:
    more = "".join(
        (
            declared("bad_words", "STRING", optional=False),
            declared("stop_words", "STRING", optional=False),
            declared("top_k", "INT32", optional=False),
            declared("seed", "UINT64", optional=False),
            declared("repetition_penalty", "FP32", optional=False),
        )
    )
    assert unsupported_reason(signature(more)) == ""
    assert tensors(more) == {
        "bad_words": [""],
        "stop_words": [""],
        "top_k": [0],
        "seed": [0],
        "repetition_penalty": [1.0],
    }


def test_unknown_required_input() -> None:
    assert "image_embedding" in unsupported_reason(signature(declared("image_embedding", "FP32", "4", False)))
    assert unsupported_reason(signature(declared("image_embedding", "FP32", "4"))) == ""


@pytest.mark.parametrize(
    ("more", "sampling", "field"),
    [
        ("", SamplingParams(temperature=0.5), "temperature"),
        ("", SamplingParams(logprobs=1), "logprobs"),
        ("", SamplingParams(stop_token_ids=(3,)), "stop_token_ids"),
        ("", SamplingParams(skip_special_tokens=False), "skip_special_tokens"),
        (
            "",
            SamplingParams(guided_decoding=GuidedDecoding(regex="a", source_field="guided_regex")),
            "guided_regex",
        ),
        (declared("stop_words", "STRING"), SamplingParams(stop=("a", "b")), "stop"),
        (declared("temperature", "INT32"), SamplingParams(temperature=0.5), "temperature"),
        (declared("seed", "INT32"), SamplingParams(seed=2**40), "seed"),
    ],
)
def test_parameters_without_an_input_are_rejected(more: str, sampling: SamplingParams, field: str) -> None:
    assert refused(more, sampling) == field


def test_guided_decoding() -> None:
    both = declared("guided_decoding_guide_type", "STRING") + declared("guided_decoding_guide", "STRING")

    def guide(**fields: Any) -> list[str]:
        made = tensors(both, SamplingParams(guided_decoding=GuidedDecoding(**fields)))
        return [text for values in made.values() for text in values]

    assert guide(json_object=True) == ["json"]
    assert guide(json={"type": "object"}) == ["json_schema", '{"type": "object"}']
    assert guide(regex="a+") == ["regex", "a+"]
    assert guide(choice=("a.b", "c")) == ["regex", r"(a\.b)|(c)"]
    assert guide(grammar="root ::= x") == ["ebnf_grammar", "root ::= x"]


def test_adapters() -> None:
    task = declared("lora_task_id", "UINT64")
    assert tensors(task, lora=LoraRequest(name="12")) == {"lora_task_id": [12]}
    assert refused(task, lora=LoraRequest(name="mine")) == "model"
    assert refused("", lora=LoraRequest(name="mine")) == "model"


def test_sampling_parameters_as_json() -> None:
    more = declared("sampling_parameters", "STRING")
    sampling = SamplingParams(
        max_tokens=5,
        stop=("a",),
        logit_bias={3: 1.0},
        guided_decoding=GuidedDecoding(json={"type": "object"}),
    )
    (text,) = tensors(more, sampling, lora=LoraRequest(name="mine"))["sampling_parameters"]
    assert orjson.loads(text) == {
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop": ["a"],
        "logit_bias": {"3": 1.0},
        "structured_outputs": '{"json":"{\\"type\\": \\"object\\"}"}',
        "lora_name": "mine",
    }
    assert refused(more, SamplingParams(return_context_logits=True)) == "return_context_logits"


def test_trtllm_logprobs() -> None:
    outputs = 'output { name: "output_log_probs" data_type: TYPE_FP32 dims: [ -1, -1 ] } '
    flags = declared("return_log_probs", "BOOL") + declared("exclude_input_in_output", "BOOL")
    assert tensors(flags + outputs, SamplingParams(logprobs=0))["return_log_probs"] == [True]
    assert "return_log_probs" not in tensors(flags + outputs)
    assert refused(flags + outputs, SamplingParams(logprobs=1)) == "logprobs"
    assert refused(flags, SamplingParams(logprobs=0)) == "logprobs"
    assert refused(outputs, SamplingParams(logprobs=0)) == "logprobs"


def test_shown_special_tokens() -> None:
    shown = SamplingParams(shown_special_tokens=("<tool>",))
    assert tensors("", shown) == {}
    (text,) = tensors(declared("sampling_parameters", "STRING"), shown)["sampling_parameters"]
    assert orjson.loads(text) == {"temperature": 1.0, "top_p": 1.0, "skip_special_tokens": False}


def test_images() -> None:
    assert tensors(declared("image", "STRING", "-1"), images=("data:image/png;base64,AAAA",)) == {
        "image": ["AAAA"]
    }
    assert tensors(declared("image_url_input", "STRING", "-1"), images=("http://x/y",)) == {
        "image_url_input": ["http://x/y"]
    }
    assert refused("", images=("AAAA",)) == "messages"


def test_optional_outputs_are_requested_if_available() -> None:
    outputs = """
    output { name: "finish_reason" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "num_output_tokens" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "context_logits" data_type: TYPE_FP32 dims: [ -1 ] }
    """

    def expected(more: str) -> set[str]:
        made = signature(outputs + more)
        inputs = request_tensors(made, GenerationRequest("a"), "a", SamplingParams(), stream=False)
        return set(requested_outputs(made, inputs))

    assert expected("") == {"text_output", "finish_reason"}
    assert expected(declared("return_num_output_tokens", "BOOL")) == {
        "text_output",
        "finish_reason",
        "num_output_tokens",
    }


GUIDE = SamplingParams(guided_decoding=GuidedDecoding(regex="(", source_field="response_format"))


@pytest.mark.parametrize(
    ("message", "sampling", "field", "reported"),
    [
        ("in ensemble 'e', guided_decoding_guide: no regex", GUIDE, "response_format", "no regex"),
        ("guided_decoding_guide_type: what?", GUIDE, "response_format", "what?"),
        ("in ensemble 'e', input_lengths: is 0", SamplingParams(), "prompt", "is 0"),
        ("random_seed: too large: 2", SamplingParams(), "seed", "too large: 2"),
        ("lora_task_id: 7 is not cached", SamplingParams(), "model", "7 is not cached"),
        ("stop_words: too many", SamplingParams(), "stop", "too many"),
    ],
)
def test_error_names_the_request_field(
    message: str, sampling: SamplingParams, field: str, reported: str
) -> None:
    error = to_parameter_error(InvalidArgument(message), sampling)
    assert isinstance(error, InvalidParameter)
    assert (error.field, error.message) == (field, reported)


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("something is wrong"),
        InvalidArgument("my_own_input: something is wrong"),
        InvalidArgument("guided_decoding_guide: but nobody gave one"),
        InternalError("seed: the model broke"),
    ],
)
def test_other_errors_are_unchanged(error: Exception) -> None:
    assert to_parameter_error(error, SamplingParams()) is error  # type: ignore[arg-type]


def test_all_special_tokens_are_shown() -> None:
    needed = SamplingParams(shown_special_tokens=("[TOOL_CALLS]",))
    assert json.loads(sampling_json(needed))["skip_special_tokens"] is False
    assert "shown_special_tokens" not in json.loads(sampling_json(needed))
    assert "skip_special_tokens" not in json.loads(sampling_json(SamplingParams()))
    assert to_vllm_sampling(needed)["skip_special_tokens"] is False
    assert to_vllm_sampling(SamplingParams())["skip_special_tokens"] is True
