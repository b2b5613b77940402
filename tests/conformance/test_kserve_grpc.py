"""KServe over gRPC with `tritonclient.grpc`, synchronous and asyncio."""

from __future__ import annotations

import queue
from functools import partial

import numpy as np
import pytest
import tritonclient.grpc as client
import tritonclient.grpc.aio as aio
from eventually import wait_until
from tritonclient.utils import InferenceServerException

from neso.generation import SamplingParams

MODEL = "neso-pilot"
QUESTION = "What is in-flight batching?"


def inputs(prompt: str, stream: bool, module=client, **flags: bool):
    tensors = [module.InferInput("text_input", [1], "BYTES"), module.InferInput("stream", [1], "BOOL")]
    tensors[0].set_data_from_numpy(np.array([prompt.encode()], np.object_))
    tensors[1].set_data_from_numpy(np.array([stream]))
    for name, value in flags.items():
        tensors.append(module.InferInput(name, [1], "BOOL"))
        tensors[-1].set_data_from_numpy(np.array([value]))
    return tensors


def text_of(result) -> str:
    output = result.as_numpy("text_output")
    return "" if output is None else output[0].decode()


def generate_text(llm, prompt: str, **params) -> str:
    return llm.generate(prompt, SamplingParams(**{"temperature": 0, **params}), progress=False)[0].text


@pytest.fixture
def triton(server):
    with client.InferenceServerClient(server.address("grpc")) as connection:
        yield connection


def test_health_and_metadata(triton):
    assert triton.is_server_live() and triton.is_server_ready() and triton.is_model_ready(MODEL)
    assert triton.get_model_metadata(MODEL).name == MODEL
    assert triton.get_model_config(MODEL).config.model_transaction_policy.decoupled
    assert triton.get_inference_statistics(MODEL).model_stats[0].name == MODEL
    assert triton.get_model_repository_index().models[0].state == "READY"


def test_unary_on_a_decoupled_model_is_rejected(triton):
    with pytest.raises(InferenceServerException, match="decoupled transaction policy") as caught:
        triton.infer(MODEL, inputs(QUESTION, False))
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_stream_with_final_flags(triton, llm):
    results: queue.Queue = queue.Queue()
    triton.start_stream(lambda result, error: results.put(error or result))
    triton.async_stream_infer(MODEL, inputs(QUESTION, True), request_id="q", parameters={"temperature": 0.0})
    text, final = "", False
    while not final:
        result = results.get(timeout=60)
        assert not isinstance(result, Exception), result
        response = result.get_response()
        assert response.id == "q"
        final = response.parameters["triton_final_response"].bool_param
        text += text_of(result)
    triton.stop_stream()
    assert text == generate_text(llm, QUESTION)


def test_many_requests_interleave_on_one_stream(triton, llm):
    prompts = [f"{QUESTION} {i}" for i in range(12)]
    results: queue.Queue = queue.Queue()
    triton.start_stream(lambda result, error: results.put(error or result))
    for i, prompt in enumerate(prompts):
        triton.async_stream_infer(
            MODEL,
            inputs(prompt, True),
            request_id=str(i),
            parameters={"temperature": 0.0, "max_tokens": 10},
            enable_empty_final_response=True,
        )
    texts, open_requests, order = dict.fromkeys(map(str, range(12)), ""), set(map(str, range(12))), []
    while open_requests:
        result = results.get(timeout=60)
        assert not isinstance(result, Exception), result
        response = result.get_response()
        texts[response.id] += text_of(result)
        order.append(response.id)
        if response.parameters["triton_final_response"].bool_param:
            open_requests.discard(response.id)
    triton.stop_stream()
    assert texts == {str(i): generate_text(llm, p, max_tokens=10) for i, p in enumerate(prompts)}
    assert order != sorted(order, key=int), "responses of different requests alternate"


def test_error_leaves_the_stream_open(triton, llm):
    results: queue.Queue = queue.Queue()
    triton.start_stream(lambda result, error: results.put(error or result))
    triton.async_stream_infer(MODEL, inputs(QUESTION, False), parameters={"max_tokens": -1})
    assert "max_tokens" in results.get(timeout=60).message()
    triton.async_stream_infer(
        MODEL, inputs(QUESTION, False), parameters={"temperature": 0.0, "max_tokens": 3}
    )
    assert text_of(results.get(timeout=60)) == generate_text(llm, QUESTION, max_tokens=3)
    triton.stop_stream()


def test_cancelled_stream_frees_its_sequences(slow_server):
    server = slow_server
    with client.InferenceServerClient(server.address("grpc")) as triton:
        results: queue.Queue = queue.Queue()
        triton.start_stream(lambda result, error: results.put(error or result))
        parameters = {"ignore_eos": True, "max_tokens": 1500}
        triton.async_stream_infer(MODEL, inputs(QUESTION, True), parameters=parameters)
        results.get(timeout=60)
        wait_until(lambda: server.gauge("vllm:num_requests_running"))
        triton.stop_stream(cancel_requests=True)
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 0)


async def test_aio_stream_and_cancel(slow_server, llm):
    server = slow_server
    async with aio.InferenceServerClient(server.address("grpc")) as triton:
        assert await triton.is_server_ready()

        async def requests(parameters):
            yield {"model_name": MODEL, "inputs": inputs(QUESTION, True, aio), "parameters": parameters}

        text = ""
        async for result, error in triton.stream_infer(requests({"temperature": 0.0})):
            assert error is None, error
            text += text_of(result)
        assert text == generate_text(llm, QUESTION)

        iterator = triton.stream_infer(requests({"ignore_eos": True, "max_tokens": 1500}))
        received = 0
        async for _ in iterator:
            received += 1
            if received == 3:
                iterator.cancel()
                break
    wait_until(partial(_idle, server))


def _idle(server) -> bool:
    return server.gauge("vllm:num_requests_running") == 0
