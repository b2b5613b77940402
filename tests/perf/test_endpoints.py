"""What each endpoint sends, and what it reads from responses."""

from __future__ import annotations

import asyncio
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub import StubRequest, response, stream, stub_server

from neso.perf.client.http import HttpTarget
from neso.perf.endpoints.base import HttpEndpoint
from neso.perf.endpoints.kserve import Convention, ModelMetadata, decode_tensor, encode_tensor
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.endpoints.registry import (
    HTTP_ENDPOINTS,
    TARGETS,
    check_endpoint_type,
    endpoint_class,
    endpoint_types,
)
from neso.perf.endpoints.sse import ServerSentEvents
from neso.perf.errors import PerfError
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest

RANKING = PerfRequest(query="q", passages=["a", "b"])
DONE = b"data: [DONE]\n\n"


def event(message: Any) -> bytes:
    return b"data: " + orjson.dumps(message) + b"\n\n"


async def exchange(
    kind: str, request: PerfRequest, answer: bytes, **fields
) -> tuple[StubRequest, RequestRecord]:
    async def handle(_: StubRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with stub_server(handle) as stub:
        options = EndpointOptions(models=("m",), urls=(stub.url,), endpoint_type=kind, **fields)
        target = HttpTarget(endpoint_class(options.endpoint_type)(options), options)
        record = RequestRecord("m", output_text="")
        await target.send(request, record, [])
        await target.close()
    return stub.requests[0], record


def unary(message: Any) -> bytes:
    return response(orjson.dumps(message))


@pytest.mark.parametrize(
    ("kind", "request_", "path", "body", "answer", "text"),
    [
        ("completions", PerfRequest("hi", system="be brief", max_tokens=3, extra={"seed": 1}), "/v1/completions",
         {"model": "m", "prompt": "be brief\nhi", "max_tokens": 3, "seed": 1},
         unary({"choices": [{"text": "ho"}], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}), "ho"),
        ("completions", PerfRequest(token_ids=[1, 2], adapter="lora"), "/v1/completions",
         {"model": "lora", "prompt": [1, 2]}, unary({"choices": [{"text": "ho"}]}), "ho"),
        ("vision", PerfRequest("what?", images=["data:image/png;base64,AA=="]), "/v1/chat/completions",
         {"model": "m", "messages": [{"role": "user", "content": [
             {"type": "text", "text": "what?"},
             {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]},
         unary({"choices": [{"message": {"content": "a cat"}}]}), "a cat"),
        ("responses", PerfRequest("hi", system="s", max_tokens=3), "/v1/responses",
         {"model": "m", "input": "hi", "instructions": "s", "max_output_tokens": 3},
         unary({"output": [{"content": [{"text": "ho"}]}], "usage": {"input_tokens": 1, "output_tokens": 2}}), "ho"),
        ("embeddings", PerfRequest(texts=["a", "b"]), "/v1/embeddings", {"model": "m", "input": ["a", "b"]},
         unary({"data": [{"embedding": [1]}, {"embedding": [2]}]}), ""),
        ("rankings", RANKING, "/v1/ranking",
         {"model": "m", "query": {"text": "q"}, "passages": [{"text": "a"}, {"text": "b"}]},
         unary({"rankings": [{"index": 0, "logit": 1.0}]}), ""),
        ("cohere-rankings", RANKING, "/v2/rerank", {"model": "m", "query": "q", "documents": ["a", "b"]},
         unary({"results": [{"index": 0, "relevance_score": 1.0}]}), ""),
        ("hf-tei-rankings", RANKING, "/rerank", {"query": "q", "texts": ["a", "b"]},
         unary([{"index": 0, "score": 1.0}]), ""),
        ("generate", PerfRequest("hi", max_tokens=3, adapter="lora"), "/v2/models/m/generate",
         {"text_input": "hi", "max_tokens": 3, "lora_name": "lora"}, unary({"text_output": "ho"}), "ho"),
        ("huggingface-generate", PerfRequest("hi", max_tokens=3), "/generate",
         {"inputs": "hi", "parameters": {"details": True, "max_new_tokens": 3}},
         unary({"generated_text": "ho", "details": {"generated_tokens": 1}}), "ho"),
        ("chat", PerfRequest(payload={"messages": [], "temperature": 0}), "/v1/chat/completions",
         {"model": "m", "messages": [], "temperature": 0}, unary({"choices": [{"message": {"content": "x"}}]}), "x"),
    ],
)  # fmt: skip
async def test_requests_and_responses(kind, request_, path, body, answer, text):
    sent, record = await exchange(kind, request_, answer)
    assert sent.path == path and orjson.loads(sent.body) == body
    assert record.ok, record.error_message
    assert record.output_text == text and len(record.arrivals_ns) == 1
    assert record.items == (2 if request_.texts or request_.passages else 1)


@pytest.mark.parametrize(
    ("kind", "path", "events"),
    [
        ("generate", "/v2/models/m/generate_stream",
         [{"text_output": "a"}, {"text_output": ""}, {"text_output": "b"}]),
        ("huggingface_generate", "/generate_stream",
         [{"token": {"text": "a"}}, {"token": {"text": "b"}, "details": {"generated_tokens": 2, "input_length": 5}},
          {"token": {"text": "</s>", "special": True}}]),
        ("responses", "/v1/responses",
         [{"type": "response.created"}, {"type": "response.output_text.delta", "delta": "a"},
          {"type": "response.output_text.delta", "delta": "b"},
          {"type": "response.completed", "response": {"usage": {"input_tokens": 5, "output_tokens": 2}}}]),
        ("completions", "/v1/completions", [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}]),
    ],
)  # fmt: skip
async def test_streams(kind, path, events):
    sent, record = await exchange(kind, PerfRequest("hi"), stream(*map(event, events), DONE), streaming=True)
    assert sent.path == path and record.ok and record.output_text == "ab" and len(record.arrivals_ns) == 2
    assert record.output_tokens in (-1, 2)


async def test_the_error_of_a_stream_of_the_responses_api():
    _, record = await exchange(
        "responses",
        PerfRequest("hi"),
        stream(event({"type": "error", "message": "no memory"})),
        streaming=True,
    )
    assert record.error_kind == "stream" and record.error_message == "no memory"


@pytest.mark.parametrize(
    "message",
    [
        {"choices": [{"delta": {"content": "x"}}]},
        {"choices": [{"delta": {"content": ""}}]},
        {"choices": [{"delta": {"content": None}}]},
        {"choices": [{"delta": {"content": 'a"content":"b'}}]},
        {"choices": [{"delta": {"content": "\\"}}]},
        {
            "choices": [
                {"delta": {"role": "assistant", "content": "x"}, "logprobs": {"content": [{"token": "x"}]}}
            ]
        },
        {"choices": [{"delta": {"reasoning_content": "x"}}]},
        {"choices": [{"delta": {"content": "", "reasoning_content": "x"}}]},
        {"choices": [{"delta": {"content": "x"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 4}},
        {"choices": [{"delta": {"content": "x"}}, {"delta": {"content": "y"}}]},
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}},
        {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": '{"content":"x"}'}}]}}]},
    ],
)
def test_the_fast_path_reads_an_event_as_the_parser_does(message):
    options = EndpointOptions(models=("m",), streaming=True, urls=("x",))
    records = [RequestRecord(output_text=text) for text in (None, "")]  # with text, all events are parsed
    for record in records:
        ServerSentEvents(endpoint_class("chat")(options)).read(event(message), record, 7)
        record.output_text = None
    assert records[0] == records[1]


_MESSAGES: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "x"}}]},
    {"choices": [{"delta": {"reasoning_content": "x"}}]},
    {"choices": [{"delta": {"content": "x"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 4}},
    {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}},
]


@given(
    st.lists(
        st.sampled_from([*map(event, _MESSAGES), b": comment\n\n", b"event: x\r\ndata: {}\r\n\r\n", DONE])
    ),
    st.lists(st.integers(1, 200)),
)
def test_a_stream_gives_the_same_record_by_the_fast_path(events, sizes):
    options = EndpointOptions(models=("m",), streaming=True, urls=("x",))
    data = b"".join(events)
    cuts = [0, *(cut for cut in accumulate(sizes) if cut < len(data)), len(data)]
    records = [RequestRecord(output_text=text) for text in (None, "")]  # with text, all events are parsed
    for record in records:
        reader = ServerSentEvents(endpoint_class("chat")(options))
        for now, (start, end) in enumerate(pairwise(cuts), 1):
            reader.read(data[start:end], record, now)
        record.output_text = None
    assert records[0] == records[1]


VLLM = ModelMetadata(
    (("text_input", "BYTES", (1,)), ("stream", "BOOL", (1,)), ("sampling_parameters", "BYTES", (1,))),
    (("text_output", "BYTES", (-1,)),),
)
ENSEMBLE = ModelMetadata(
    (("text_input", "BYTES", (-1, 1)), ("max_tokens", "INT32", (-1, 1)), ("stream", "BOOL", (-1, 1))), (), 8
)
ENGINE = ModelMetadata(
    (("input_ids", "INT32", (-1, -1)), ("input_lengths", "INT32", (-1, 1)), ("request_output_len", "INT32", (-1, 1))),
    (), 8,
)  # fmt: skip


@pytest.mark.parametrize(
    ("metadata", "kind", "expected"),
    [
        (
            VLLM,
            "vllm",
            {"text_input": [b"hi"], "stream": [True], "sampling_parameters": [b'{"max_tokens": 3}']},
        ),
        (ENSEMBLE, "tensorrtllm", {"text_input": [[b"hi"]], "max_tokens": [[3]], "stream": [[True]]}),
        (ENGINE, "engine", {"input_ids": [[4, 5]], "input_lengths": [[2]], "request_output_len": [[3]]}),
    ],
)
def test_tensors_follow_the_metadata_of_a_language_model(metadata, kind, expected):
    convention = Convention("auto", metadata)
    tensors = convention.tensors(PerfRequest("hi", token_ids=[4, 5], max_tokens=3), streaming=True)
    assert convention.kind == kind
    assert {name: array.tolist() for name, array in tensors.items()} == expected


def test_a_model_without_text_takes_the_tensors_of_the_source():
    convention = Convention("auto", ModelMetadata((("IN", "FP32", (4,)),), ()))
    tensors = {"IN": np.ones(4, np.float32)}
    assert convention.tensors(PerfRequest(tensors=tensors), streaming=False) is tensors
    with pytest.raises(PerfError, match="tensors"):
        convention.tensors(PerfRequest("hi"), streaming=False)
    with pytest.raises(PerfError, match="token ids"):
        Convention("auto", ENGINE).tensors(PerfRequest("hi"), streaming=False)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.array([True, False]),
        np.array([b"a", b"\xc3\xa9"], np.object_),
    ],
)
def test_binary_tensors_are_the_same_after_decoding(array):
    datatype, data = encode_tensor(array)
    assert decode_tensor(datatype, list(array.shape), data).tolist() == array.tolist()


class Echo(HttpEndpoint):
    """An endpoint as users write them."""

    path = "/echo"
    can_stream = False

    def body(self, request, model, history):
        return request.text.encode()

    def response(self, record, body, now):
        record.arrivals_ns.append(now)
        record.output_text = body.decode()


async def test_an_endpoint_of_ones_own_is_named_by_module_and_class():
    sent, record = await exchange(f"{__name__}:Echo", PerfRequest("hello"), response(b"HELLO"))
    assert sent.path == "/echo" and record.ok and record.output_text == "HELLO"


@pytest.mark.parametrize(
    ("name", "message"),
    [("caht", "known are chat"), ("no_module:X", "cannot be loaded"), ("json:JSONDecoder", "no subclass")],
)
def test_unknown_endpoint_types_are_refused(name, message):
    with pytest.raises(PerfError, match=message):
        check_endpoint_type(name)


def test_every_endpoint_type_can_be_loaded():
    for name in (*HTTP_ENDPOINTS, *TARGETS):
        check_endpoint_type(name)
        assert name in endpoint_types()


@pytest.mark.parametrize("kind", ["embeddings", "rankings"])
def test_streaming_is_refused_where_there_is_no_stream(kind):
    options = EndpointOptions(models=("m",), streaming=True, endpoint_type=kind)
    with pytest.raises(PerfError, match="no streamed responses"):
        endpoint_class(kind)(options)
