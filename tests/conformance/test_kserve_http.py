"""KServe over HTTP: `tritonclient.http`, curl as in the README, and the generate endpoints."""

from __future__ import annotations

import subprocess

import numpy as np
import orjson
import pytest
import tritonclient.http as client
from tritonclient.utils import InferenceServerException

from neso.generation import SamplingParams

MODEL = "neso-pilot"
QUESTION = "What is in-flight batching?"
GENERATE = f"/v2/models/{MODEL}/generate"


@pytest.fixture(scope="module")
def triton(server):
    with client.InferenceServerClient(server.address("http")) as connection:
        yield connection


def generate_text(llm, prompt: str, **params) -> str:
    return llm.generate(prompt, SamplingParams(**{"temperature": 0, **params}), progress=False)[0].text


def test_readme_curl_example(server, llm):
    body = f'{{"text_input": "{QUESTION}", "parameters": {{"stream": false, "temperature": 0}}}}'
    command = ["curl", "-s", "-X", "POST", server.url(GENERATE), "-d", body]
    reply = orjson.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert reply == {"model_name": MODEL, "model_version": "1", "text_output": generate_text(llm, QUESTION)}
    assert len(reply["text_output"].split()) > 8, "a sentence at least"


def test_health_and_metadata(triton):
    assert triton.is_server_live() and triton.is_server_ready() and triton.is_model_ready(MODEL)
    assert triton.is_model_ready(MODEL, "1")
    assert triton.get_server_metadata()["name"] == "neso"
    metadata = triton.get_model_metadata(MODEL)
    assert {i["name"] for i in metadata["inputs"]} >= {"text_input", "stream", "sampling_parameters"}
    assert metadata["versions"] == ["1"]
    config = triton.get_model_config(MODEL)
    assert config["backend"] == "llm" and config["model_transaction_policy"]["decoupled"]
    (entry,) = triton.get_model_repository_index()
    assert (entry["name"], entry["state"]) == (MODEL, "READY")
    assert triton.get_inference_statistics(MODEL)["model_stats"][0]["name"] == MODEL


def test_infer_is_rejected_on_a_decoupled_model(triton):
    tensor = client.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([QUESTION.encode()], np.object_))
    with pytest.raises(InferenceServerException, match="decoupled"):
        triton.infer(MODEL, [tensor])


def test_generate_parameters_at_either_level(server, llm):
    expected = generate_text(llm, QUESTION, max_tokens=7)
    for body in (
        {"text_input": QUESTION, "temperature": 0, "max_tokens": 7},
        {"text_input": QUESTION, "parameters": {"temperature": 0, "max_tokens": 7}},
        {"text_input": QUESTION, "sampling_parameters": '{"temperature": 0, "max_tokens": 7}'},
    ):
        assert server.post(GENERATE, body)[1]["text_output"] == expected


def test_generate_returns_additional_outputs(server, llm):
    body = {
        "id": "seven",
        "text_input": QUESTION,
        "parameters": {"temperature": 0, "max_tokens": 7, "exclude_input_in_output": False},
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_cumulative_logprob": True,
        "return_logprobs": True,
    }
    status, reply = server.post(GENERATE, body)
    assert status == 200
    assert reply["text_output"] == QUESTION + generate_text(llm, QUESTION, max_tokens=7)
    assert (reply["id"], reply["finish_reason"], reply["num_output_tokens"]) == ("seven", "length", 7)
    assert reply["num_input_tokens"] == len(llm.tokenizer.encode(QUESTION))
    logprobs = orjson.loads(reply["logprobs"])
    assert sum(max(p.values(), key=lambda e: e["logprob"])["logprob"] for p in logprobs) == pytest.approx(
        reply["cumulative_logprob"], abs=1e-3
    )


def test_generate_n_is_an_array(server):
    body = {"text_input": QUESTION, "parameters": {"n": 3, "temperature": 1.2, "seed": 1, "max_tokens": 9}}
    texts = server.post(GENERATE, body)[1]["text_output"]
    assert len(texts) == 3 and texts == server.post(GENERATE, body)[1]["text_output"]


def test_generate_stop_strings(server, llm):
    full = generate_text(llm, QUESTION)
    stop = full[10:14]
    body = {"text_input": QUESTION, "parameters": {"temperature": 0, "stop": stop}}
    assert server.post(GENERATE, body)[1]["text_output"] == full[: full.index(stop)]


def test_generate_stream_equals_generate(server, llm):
    command = ["curl", "-sN", "-X", "POST", server.url(GENERATE + "_stream"), "-d"]
    body = orjson.dumps({"text_input": QUESTION, "stream": True, "temperature": 0}).decode()
    output = subprocess.run([*command, body], capture_output=True, check=True).stdout
    events = [orjson.loads(line.removeprefix(b"data: ")) for line in output.split(b"\n\n") if line]
    assert len(events) > 5, "token by token"
    assert "".join(event["text_output"] for event in events) == generate_text(llm, QUESTION)
    assert b"[DONE]" not in output


def test_metrics_count(server):
    before = server.metrics()
    server.post(GENERATE, {"text_input": QUESTION, "max_tokens": 5, "temperature": 0, "ignore_eos": True})
    after = server.metrics()

    def increase(name: str) -> float:
        key = f'{name}{{model="{MODEL}",version="1"}}'
        return after[key] - before.get(key, 0)

    assert increase("nv_inference_request_success") == 1
    assert increase("nv_inference_count") == 1
    assert increase("vllm:generation_tokens_total") == 5
    assert increase("vllm:time_to_first_token_seconds_count") == 1
    assert increase("vllm:time_per_output_token_seconds_count") == 4
    assert increase("vllm:e2e_request_latency_seconds_count") == 1
    assert increase("nv_inference_request_duration_us") > 0
