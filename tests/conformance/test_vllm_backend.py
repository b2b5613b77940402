"""The backend `vllm` with vLLM (CPU build) in a server process, with real clients."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
import tritonclient.grpc as client
import tritonclient.grpc.aio as aio
from doc_reader import at_addresses, blocks
from eventually import wait_until
from server_process import ServerProcess
from tritonclient.utils import InferenceServerException
from vllm_environment import ENVIRONMENT, PYTHON, require_vllm

from neso.generation import SamplingParams
from neso.models import SHIPPED_MODELS

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from peft_adapters import greedy_with, write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PILOT = SHIPPED_MODELS["neso-pilot"]
MODEL, EMBEDDER = "vllm_model", "vllm_embed"
QUESTION = "What is in-flight batching?"
# One pixel.
IMAGE = "R0lGODdhAQABAIAAAP8AAAAAACwAAAAAAQABAAACAkQBADs="
ENGINE = {"model": "neso-pilot", "dtype": "float32", "enforce_eager": True, "max_model_len": 512}
# As in Triton's samples, including arguments that vLLM has removed.
CONFIG = """
backend: "vllm"

# The usage of device is deferred to the vLLM engine
instance_group [
  {
    count: 1
    kind: KIND_MODEL
  }
]
parameters: { key: "REPORT_CUSTOM_METRICS" value: { string_value: "yes" } }
parameters: { key: "ENABLE_VLLM_HEALTH_CHECK" value: { string_value: "true" } }
"""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(PILOT, tmp_path_factory.mktemp("adapter"), seed=5)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repository")


@pytest.fixture(scope="module")
def server(repository: Path, adapter: Path) -> Iterator[ServerProcess]:
    """Two engines: one generates, with an adapter; the other computes embeddings."""
    require_vllm()
    generates = {
        **ENGINE,
        "disable_log_requests": "true",
        "gpu_memory_utilization": 0.5,
        "enable_lora": True,
        "max_lora_rank": 8,
        "generation_config": "defaults",
        "override_generation_config": {"max_new_tokens": 300},
        # The model generates spaces if allowed.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    for name, arguments in {MODEL: generates, EMBEDDER: {**ENGINE, "runner": "pooling"}}.items():
        version = repository / name / "1"
        version.mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(CONFIG)
        (version / "model.json").write_text(json.dumps(arguments))
    (repository / MODEL / "1" / "multi_lora.json").write_text(json.dumps({"doll": str(adapter)}))
    defaults = json.loads((PILOT / "generation_config.json").read_text())  # including its end tokens
    (repository / MODEL / "1" / "defaults").mkdir()
    (repository / MODEL / "1" / "defaults" / "generation_config.json").write_text(
        json.dumps({**defaults, "temperature": 0.9})
    )
    with ServerProcess(
        f"--model-repository={repository}",
        "--model-control-mode=explicit",
        "--load-model=*",
        python=PYTHON,
        environment={**ENVIRONMENT, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        timeout=480,
    ) as process:
        assert process.ports, process.output
        yield process


def generate(server: ServerProcess, body: dict[str, Any], model: str = MODEL) -> Any:
    _, response = server.post(f"/v2/models/{model}/generate", body)
    return response


def stream(server: ServerProcess, body: dict[str, Any]) -> list[dict[str, Any]]:
    command = ["curl", "-sN", server.url(f"/v2/models/{MODEL}/generate_stream"), "-d", json.dumps(body)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [json.loads(line.removeprefix("data: ")) for line in output.splitlines() if line]


def tensors(prompt: str, module: Any = client, **others: Any) -> list[Any]:
    """Return inputs: strings become BYTES, dictionaries their JSON text, booleans BOOL."""
    made = []
    for name, value in {"text_input": prompt, **others}.items():
        if isinstance(value, dict):
            value = json.dumps(value)
        if isinstance(value, bool):
            tensor, array = module.InferInput(name, [1], "BOOL"), np.array([value])
        else:
            tensor = module.InferInput(name, [1], "BYTES")
            array = np.array([value.encode()], np.object_)
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def grpc_stream(server: ServerProcess, inputs: list[Any], model: str = MODEL, **options: Any) -> list[Any]:
    """Return the responses of one request; the last is an error if there was one."""
    responses: queue.Queue[Any] = queue.Queue()
    with client.InferenceServerClient(server.address("grpc")) as triton:
        triton.start_stream(partial(lambda put, result, error: put(error or result), responses.put))
        triton.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)
        received = []
        while True:
            received.append(responses.get(timeout=60))
            if isinstance(received[-1], Exception):
                return received
            if received[-1].get_response().parameters["triton_final_response"].bool_param:
                return received


def strings(result: Any, name: str = "text_output") -> list[str]:
    array = result.as_numpy(name)
    return [] if array is None else [element.decode() for element in array]


def expected(llm: Any, prompt: str = QUESTION, **params: Any) -> str:
    """Return the output of Neso's engine: the same model, greedy, in float32."""
    return str(llm.generate(prompt, SamplingParams(**{"temperature": 0, **params}), progress=False)[0].text)


# -- generate ---------------------------------------------------------------------------------------------------


def test_signature_equals_triton_backend(server):
    with client.InferenceServerClient(server.address("grpc")) as triton:
        config = triton.get_model_config(MODEL).config
        metadata = triton.get_model_metadata(MODEL)
    assert config.backend == "vllm"
    assert config.max_batch_size == 0
    assert config.model_transaction_policy.decoupled
    assert {tensor.name for tensor in config.input if not tensor.optional} == {"text_input"}
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.outputs] == [
        ("text_output", "BYTES", [-1]),
        ("finish_reason", "BYTES", [-1]),
        ("cumulative_logprob", "FP32", [-1]),
        ("logprobs", "BYTES", [-1]),
        ("num_input_tokens", "UINT32", [1]),
        ("num_output_tokens", "UINT32", [-1]),
    ]


def test_first_request_of_the_guide(server, llm):
    """The output starts with the prompt unless it is excluded."""
    body = {"text_input": QUESTION, "parameters": {"stream": False, "temperature": 0}}
    response = generate(server, body)
    assert response == {
        "model_name": MODEL,
        "model_version": "1",
        "text_output": QUESTION + expected(llm, max_tokens=16),  # vLLM's default
    }
    excluded = {**body, "exclude_input_in_output": True}
    assert generate(server, excluded)["text_output"] == expected(llm, max_tokens=16)


def test_a_stream_of_deltas(server, llm):
    parts = stream(server, {"text_input": QUESTION, "stream": True, "temperature": 0, "max_tokens": 30})
    assert len(parts) > 5
    assert "".join(part["text_output"] for part in parts) == expected(llm, max_tokens=30)


def test_sampling_parameters_as_a_tensor(server, llm):
    params = {
        "temperature": "0",
        "max_tokens": 20,
        "stop": ["requests"],
        "include_stop_str_in_output": "true",
    }
    response = generate(server, {"text_input": QUESTION, "sampling_parameters": json.dumps(params)})
    requested = expected(llm, max_tokens=20, stop=("requests",), include_stop_str_in_output=True)
    assert response["text_output"] == QUESTION + requested


def test_several_sequences(server):
    params = {"n": 3, "temperature": 2, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    body = {
        "text_input": QUESTION,
        "sampling_parameters": json.dumps(params),
        "return_num_output_tokens": True,
    }
    whole = generate(server, {**body, "exclude_input_in_output": True})
    assert whole["num_output_tokens"] == [12, 12, 12]
    assert len(set(whole["text_output"])) == 3
    parts = stream(server, {**body, "stream": True})
    assert all(len(part["text_output"]) == 3 for part in parts)
    joined = ["".join(part["text_output"][i] for part in parts) for i in range(3)]
    assert joined == whole["text_output"]
    assert np.sum([part["num_output_tokens"] for part in parts], axis=0).tolist() == [12, 12, 12]


@pytest.mark.parametrize(
    ("form", "fits"),
    [
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"regex": "[0-9]{3}-[a-z]{2}"}, lambda text: text[3] == "-" and text[:3].isdigit()),
        (
            {
                "json": {
                    "type": "object",
                    "properties": {"a": {"enum": [1, 2]}},
                    "required": ["a"],
                }
            },
            lambda text: isinstance(json.loads(text)["a"], int),
        ),
    ],
)
def test_structured_outputs(server, form, fits):
    params = {"structured_outputs": json.dumps(form), "temperature": 0, "max_tokens": 60}
    body = {
        "text_input": QUESTION,
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps(params),
    }
    assert fits(generate(server, body)["text_output"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": -1}, "Error generating stream: temperature"),
        ({"no_such": 1}, "Error generating stream: no_such: vLLM has no such sampling parameter"),
        ({"max_tokens": "many"}, "Error generating stream: max_tokens: "),
        ({"sampling_parameters": "{"}, "Error generating stream: sampling_parameters: not valid JSON"),
        (
            {"structured_outputs": '{"jsn": {}}'},
            "Error generating stream: structured_outputs: has no field 'jsn'",
        ),
        ({"image": ["!"]}, "Error generating stream: image: an image is not valid base64"),
        # Valid images need a vision model: see test_vllm_images.py.
        ({"image": [IMAGE]}, "Error generating stream: image: vLLM cannot put the images into the prompt: "),
        (
            {"stream": True, "exclude_input_in_output": False},
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed.",
        ),
        (
            {"text_input": "word " * 2000},
            "Error generating stream: This model's maximum context length is 512 tokens",
        ),
        ({"lora_name": "sheep"}, "LoRA sheep is not supported, we currently support ['doll']"),
    ],
)
def test_invalid_requests(server, llm, body, message):
    status, response = server.post(f"/v2/models/{MODEL}/generate", {"text_input": QUESTION, **body})
    assert status == 400
    assert response["error"].startswith(message)
    good = {"text_input": QUESTION, "temperature": 0, "max_tokens": 4, "exclude_input_in_output": True}
    assert generate(server, good)["text_output"] == expected(llm, max_tokens=4)


# -- gRPC -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_all_outputs_over_grpc(server, streaming):
    expected = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    params = {"temperature": 0, "max_tokens": 16, "logprobs": 2, "ignore_eos": True}
    inputs = tensors(
        QUESTION,
        stream=streaming,
        sampling_parameters=params,
        **{f"return_{name}": True for name in expected},
    )
    responses = [
        r for r in grpc_stream(server, inputs, request_id="7") if r.as_numpy("text_output") is not None
    ]
    assert len(responses) > 1 if streaming else len(responses) == 1
    assert {response.get_response().id for response in responses} == {"7"}
    text, total, cumulative = "" if streaming else QUESTION, 0, 0.0
    for response in responses:
        positions = json.loads(strings(response, "logprobs")[0])
        count = response.as_numpy("num_output_tokens").tolist()
        assert count == [len(positions)]
        total += count[0]
        for position in positions:
            assert len(position) >= 2
            best = next(entry for entry in position.values() if entry["rank"] == 1)
            text += best["decoded_token"]
            cumulative += best["logprob"]
        assert response.as_numpy("cumulative_logprob")[0] == pytest.approx(cumulative, rel=1e-4)
        assert 0 < response.as_numpy("num_input_tokens")[0] <= len(QUESTION)
    reasons = [strings(response, "finish_reason") for response in responses]
    assert reasons == [["None"]] * (len(responses) - 1) + [["length"]]
    assert total == 16
    assert "".join(strings(response)[0] for response in responses) == text


def test_unrequested_outputs_are_omitted(server):
    (response, *_) = grpc_stream(server, tensors(QUESTION))
    assert [output.name for output in response.get_response().outputs] == ["text_output"]


def test_request_parameters_over_grpc(server, llm):
    responses = grpc_stream(
        server, tensors(QUESTION, stream=True), parameters={"temperature": "0", "max_tokens": "8"}
    )
    assert "".join(text for r in responses for text in strings(r)) == expected(llm, max_tokens=8)


def test_error_ends_only_its_request(server):
    with client.InferenceServerClient(server.address("grpc")) as triton:
        received: queue.Queue[Any] = queue.Queue()
        triton.start_stream(lambda result, error: received.put(error or result))
        bad = tensors(QUESTION, stream=True, exclude_input_in_output=False)
        triton.async_stream_infer(MODEL, bad)
        error = received.get(timeout=60)
        assert isinstance(error, InferenceServerException)
        assert "When streaming, `exclude_input_in_output` = False is not allowed." in str(error)
        triton.async_stream_infer(MODEL, tensors(QUESTION))
        assert strings(received.get(timeout=60))[0].startswith(QUESTION)


async def test_many_streams_of_the_asyncio_client(server, llm):
    prompts = [f"{QUESTION} ({i})" for i in range(12)]

    async def requests():
        for i, prompt in enumerate(prompts):
            yield {
                "model_name": MODEL,
                "inputs": tensors(
                    prompt, aio, stream=True, sampling_parameters={"temperature": 0, "max_tokens": 9}
                ),
                "request_id": str(i),
            }

    texts = dict.fromkeys(map(str, range(len(prompts))), "")
    finals = 0
    async with aio.InferenceServerClient(server.address("grpc")) as triton:
        async for result, error in triton.stream_infer(requests()):
            assert error is None
            response = result.get_response()
            texts[response.id] += "".join(strings(result))
            finals += response.parameters["triton_final_response"].bool_param
            if finals == len(prompts):
                break
    assert list(texts.values()) == [expected(llm, prompt, max_tokens=9) for prompt in prompts]


# -- cancellation -----------------------------------------------------------------------------------------------

LONG = {"temperature": 0, "max_tokens": 480, "ignore_eos": True}


def running(server: ServerProcess) -> float:
    return server.metrics()[f'vllm:num_requests_running{{model="{MODEL}",version="1"}}']


def long_stream(server: ServerProcess) -> socket.socket:
    """A connection on which a long response has started."""
    body = json.dumps({"text_input": QUESTION, "stream": True, **LONG}).encode()
    connection = socket.create_connection(("127.0.0.1", server.ports["http"]), 30)
    head = (
        f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    assert connection.recv(65536)
    return connection


def test_disconnect_aborts_in_the_engine(server):
    """Checked with vLLM's count of running requests, which another request keeps up to date."""
    stays = long_stream(server)
    goes = long_stream(server)
    body = json.dumps({"text_input": QUESTION, **LONG})
    command = ["curl", "-s", server.url(f"/v2/models/{MODEL}/generate"), "-d", body]
    quits = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_until(lambda: running(server) == 3)
    goes.close()
    quits.kill()
    quits.wait()
    wait_until(lambda: running(server) == 1)
    stays.close()
    wait_until(lambda: running(server) == 0)
    assert server.gauge("vllm:kv_cache_usage_perc") == 0
    wait_until(lambda: idle(server))


def idle(server: ServerProcess) -> bool:
    """Return whether the engine processes use almost no CPU for a while."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    before = sum(process.cpu_times().user for process in processes)
    time.sleep(0.5)
    return sum(process.cpu_times().user for process in processes) - before < 0.1


def test_cancelling_over_grpc(server):
    received: queue.Queue[Any] = queue.Queue()
    with client.InferenceServerClient(server.address("grpc")) as triton:
        triton.start_stream(lambda result, error: received.put(error or result))
        triton.async_stream_infer(MODEL, tensors(QUESTION, stream=True, sampling_parameters=LONG))
        assert not isinstance(received.get(timeout=60), Exception)
        triton.stop_stream(cancel_requests=True)
    wait_until(lambda: running(server) == 0)
    last = None
    while not received.empty():
        last = received.get()
    assert isinstance(last, InferenceServerException)
    assert "CANCELLED" in str(last.status())
    for line in ("[vllm] Cancelling the request", "[vllm] Successfully cancelled the request"):
        wait_until(lambda line=line: line in server.output)


async def test_cancelling_with_the_asyncio_client(server):
    async def requests():
        yield {"model_name": MODEL, "inputs": tensors(QUESTION, aio, stream=True, sampling_parameters=LONG)}

    async with aio.InferenceServerClient(server.address("grpc")) as triton:
        answers = triton.stream_infer(requests())
        async for _ in answers:
            break
        assert running(server) == 1
        assert answers.cancel()
    await asyncio.to_thread(wait_until, lambda: running(server) == 0, 5)


# -- adapters ---------------------------------------------------------------------------------------------------


def test_adapters(server, llm, adapter):
    params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    prompt = llm.tokenizer.encode(QUESTION)
    (ids,) = greedy_with(PILOT, adapter, [prompt], 8)
    body = {"text_input": QUESTION, "exclude_input_in_output": True}
    adapted = generate(server, {**body, "sampling_parameters": json.dumps({**params, "lora_name": "doll"})})
    assert adapted["text_output"] == llm.tokenizer.decode(ids)
    plain = generate(server, {**body, "sampling_parameters": json.dumps(params)})
    assert plain["text_output"] == expected(llm, max_tokens=8, ignore_eos=True) != adapted["text_output"]


def change_adapters(server: ServerProcess, what: str, **body: str) -> str:
    """Return the response text of vLLM's route."""
    command = [
        "curl",
        "-s",
        server.url(f"/v1/{what}_lora_adapter", "openai"),
        "-H",
        "Content-Type: application/json",
    ]
    body["model"] = MODEL
    result = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, text=True, timeout=110)
    return result.stdout


def test_load_and_unload_adapters(server, adapter):
    def generate_with(name: str) -> Any:
        return generate(
            server, {"text_input": QUESTION, "temperature": 0, "max_tokens": 6, "lora_name": name}
        )

    message = change_adapters(server, "load", lora_name="sheep", lora_path=str(adapter))
    assert "added successfully" in message
    assert generate_with("sheep") == generate_with("doll")
    refused = change_adapters(server, "load", lora_name="ghost", lora_path=str(adapter / "nowhere"))
    assert "vLLM cannot load adapter 'ghost'" in refused
    change_adapters(server, "unload", lora_name="sheep")
    for name in ("sheep", "ghost"):
        expected = f"LoRA {name} is not supported, we currently support ['doll']"
        assert generate_with(name) == {"error": expected}


def test_disabled_adapters(server):
    """The embedding model has none."""
    response = generate(server, {"text_input": "x", "lora_name": "doll"}, EMBEDDER)
    assert response == {"error": "LoRA feature is not enabled."}


# -- embeddings -------------------------------------------------------------------------------------------------


def vector(server: ServerProcess, given: str | list[int]) -> list[float]:
    request = {"input": given, "pooling_params": {}}
    inputs = tensors("", embedding_request=request, return_num_input_tokens=True)
    (response, *_) = grpc_stream(server, inputs, EMBEDDER)
    assert not isinstance(response, Exception), response
    assert response.as_numpy("num_input_tokens")[0] > 0
    return json.loads(strings(response)[0])


def test_embedding_requests(server, llm):
    values = vector(server, QUESTION)
    assert len(values) == 256
    assert np.linalg.norm(values) == pytest.approx(1, abs=1e-3)
    assert vector(server, llm.tokenizer.encode(QUESTION)) == pytest.approx(values, abs=1e-5)
    with openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none") as api:
        reply = api.embeddings.create(model=EMBEDDER, input=[QUESTION, "Hello"])
    assert reply.data[0].embedding == pytest.approx(values, abs=1e-5)
    assert reply.usage.prompt_tokens > 2


def test_embedding_and_generation_requests_are_distinguished(server):
    response = generate(server, {"text_input": QUESTION}, EMBEDDER)
    assert response == {
        "error": f"Error generating stream: model '{EMBEDDER}' is an embedding model; send embedding_request"
    }
    response = generate(server, {"text_input": "", "embedding_request": '{"input": "x"}'})
    assert response == {"error": f"Error generating stream: model '{MODEL}' does not support embeddings"}


# -- OpenAI -----------------------------------------------------------------------------------------------------


@pytest.fixture
def api(server):
    with openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0) as connection:
        yield connection


MESSAGES: Any = [{"role": "user", "content": QUESTION}]


def test_openai_models(api):
    assert {model.id for model in api.models.list()} >= {MODEL, "doll"}


def test_openai_chat(api, llm):
    expected = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=40))
    reply = api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=40)
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].finish_reason == expected.outputs[0].finish_reason.value
    assert reply.usage.prompt_tokens == len(expected.prompt_token_ids)
    chunks = list(
        api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=40, stream=True)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text


def test_openai_sampling_defaults(server, api):
    """Defaults of the folder that model.json names; tensor requests have none."""
    response = api.responses.create(model=MODEL, input=QUESTION, max_output_tokens=3)
    assert response.temperature == 0.9
    response = api.responses.create(model=MODEL, input=QUESTION, max_output_tokens=3, temperature=0.5)
    assert response.temperature == 0.5
    long = api.completions.create(
        model=MODEL, prompt="A", temperature=0, max_tokens=400, extra_body={"ignore_eos": True}
    )
    assert long.usage.completion_tokens == 300
    body = {"text_input": "A", "parameters": {"temperature": 0, "max_tokens": 310, "ignore_eos": True}}
    generated = generate(server, {**body, "return_num_output_tokens": True, "exclude_input_in_output": True})
    assert generated["num_output_tokens"] == 310
    assert (
        "default sampling parameters for OpenAI: temperature 0.9, max_new_tokens 300 at most, from "
        in server.output
    )


def test_openai_logprobs_echo_and_n(api, llm):
    given = {"prompt": QUESTION, "max_tokens": 5, "temperature": 0, "logprobs": 2, "echo": True}
    reply = api.completions.create(model=MODEL, **given).choices[0]
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=2)
    (own,) = llm.generate(QUESTION, params, progress=False)
    assert reply.text == QUESTION + own.text
    generated = [entry.logprob for entry in own.outputs[0].logprobs]
    assert reply.logprobs.token_logprobs[-len(generated) :] == pytest.approx(generated, abs=0.05)
    prompt = [entry.logprob for entry in own.prompt_logprobs[1:]]
    assert reply.logprobs.token_logprobs[1 : 1 + len(prompt)] == pytest.approx(prompt, abs=0.05)
    several = api.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, max_tokens=6, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2]


def test_openai_response_format_and_tools(api):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    reply = api.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format=form, max_tokens=60, temperature=0
    )
    assert isinstance(json.loads(reply.choices[0].message.content)["n"], int)
    tool: Any = {"type": "function", "function": {"name": "count", "parameters": schema}}
    reply = api.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required", max_tokens=80, temperature=0
    )
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "count"
    assert isinstance(json.loads(call.function.arguments)["n"], int)


def test_openai_adapters(api, llm, adapter):
    reply = api.completions.create(
        model=f"{MODEL}:doll", prompt=QUESTION, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    (ids,) = greedy_with(PILOT, adapter, [llm.tokenizer.encode(QUESTION)], 8)
    assert reply.choices[0].text == llm.tokenizer.decode(ids)


def test_openai_unsupported_parameters(api):
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model=MODEL, prompt="word " * 1000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="Token id 1000000 is out of vocabulary") as caught:
        api.completions.create(model=MODEL, prompt=[1_000_000])
    assert caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match=r"grammar|regex"):
        api.completions.create(model=MODEL, prompt="a", extra_body={"guided_regex": "("})


# -- the guide ------------------------------------------------------------------------------------------------------

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "vllm-backend.md"


def guide_examples() -> list[tuple[str, str]]:
    """Return language and code of the examples that run against a server."""
    return [
        (block.language, block.text)
        for block in blocks(GUIDE.read_text())
        if block.language in ("bash", "python") and block.path is None
    ]


@pytest.mark.parametrize(("language", "code"), guide_examples())
def test_guide_examples(server, language, code):
    program = [sys.executable, "-c"] if language == "python" else ["bash", "-euo", "pipefail", "-c"]
    result = subprocess.run(
        [*program, at_addresses(code, server)], capture_output=True, text=True, timeout=110
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 10
    assert '"error"' not in result.stdout


# -- engine lifecycle -------------------------------------------------------------------------------------------


def test_metrics(server):
    def total(name: str) -> float:
        return server.metrics()[f'vllm:{name}{{model="{MODEL}",version="1"}}']

    names = (
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_params_n_count",
        "request_params_n_sum",
    )
    before = {name: total(name) for name in names}
    params = {"n": 2, "max_tokens": 5, "ignore_eos": True}
    generate(server, {"text_input": QUESTION, "sampling_parameters": json.dumps(params)})
    wait_until(lambda: total("generation_tokens_total") == before["generation_tokens_total"] + 10)
    assert total("prompt_tokens_total") > before["prompt_tokens_total"]
    assert total("request_params_n_sum") == before["request_params_n_sum"] + 2
    text = server.get("/metrics", "metrics")[1].decode()
    for name, bucket in {
        "time_to_first_token_seconds": "0.001",
        "time_per_output_token_seconds": "0.01",
        "e2e_request_latency_seconds": "1",
        "request_prompt_tokens": "1",
        "request_generation_tokens": "1",
        "request_params_best_of": "1",
        "request_params_n": "1",
    }.items():
        assert f"# TYPE vllm:{name} histogram" in text
        assert f'vllm:{name}_count{{model="{MODEL}",version="1"}}' in text
        assert f'vllm:{name}_bucket{{model="{MODEL}",version="1",le="{bucket}"}}' in text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model.json": '{"model": "neso-pilot", "max_len": 8}'}, "has no engine argument 'max_len'"),
        ({"model.json": '{"model": "neso-pilot", "max_model_len": "many"}'}, "max_model_len"),
        ({"model.json": "{"}, "model.json: not valid JSON"),
        ({}, "there is no model.json in the version's folder"),
    ],
)
def test_invalid_arguments(server, repository, files, message):
    version = repository / "wrong" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version / "model.json").unlink(missing_ok=True)
    for name, text in files.items():
        (version / name).write_text(text)
    _, response = server.post("/v2/repository/models/wrong/load", {})
    assert message in response["error"]


def engine_processes(server: ServerProcess) -> set[psutil.Process]:
    return {p for p in psutil.Process(server.process.pid).children(recursive=True) if holds_memory(p)}


def holds_memory(process: psutil.Process) -> bool:
    """Return whether the process is an engine, not a helper process of multiprocessing."""
    try:
        return process.memory_info().rss > 100e6
    except psutil.NoSuchProcess:
        return False


def test_unload_after_a_stream_releases_everything(server):
    before = engine_processes(server)
    connection = long_stream(server)
    connection.close()
    assert server.post(f"/v2/repository/models/{MODEL}/unload", {})[0] == 200
    wait_until(lambda: server.get(f"/v2/models/{MODEL}/ready")[0] == 400)
    wait_until(lambda: len(engine_processes(server)) == len(before) // 2)
    assert not [
        name for name in server.metrics() if name.startswith(f'vllm:num_requests_running{{model="{MODEL}"')
    ]
    assert len(vector(server, QUESTION)) == 256  # the other one continues


def test_dead_engine_is_not_ready_and_unloads(server):
    assert server.get(f"/v2/models/{EMBEDDER}/ready")[0] == 200
    for process in engine_processes(server):
        process.kill()
    wait_until(lambda: server.get(f"/v2/models/{EMBEDDER}/ready")[0] == 400)
    embedding = tensors("", embedding_request={"input": "x"})
    (error,) = grpc_stream(server, embedding, EMBEDDER)
    assert error.message() == "Model is unavailable due to unhealthy vLLM engine"
    wait_until(lambda: state(server, EMBEDDER) == "UNAVAILABLE")
    (error,) = grpc_stream(server, embedding, EMBEDDER)
    assert error.message() == f"Request for unknown model: '{EMBEDDER}' has no available versions"
    assert server.get("/v2/health/live")[0] == 200


def state(server: ServerProcess, model: str) -> str:
    entries = server.post("/v2/repository/index", {})[1]
    return next(entry["state"] for entry in entries if entry["name"] == model)
