"""Traces of the bundled model, from the client's request to prefill and decode, for every API."""

from __future__ import annotations

import asyncio
import queue
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import orjson
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

sys.path.insert(0, str(Path(__file__).parents[2] / "server" / "tracing"))

from otlp_collector import Collector, collecting

from neso.frontends.frontend_options import GrpcOptions, HttpOptions
from neso.frontends.kserve.grpc_frontend import KServeGrpc
from neso.frontends.kserve.http_frontend import KServeHttp
from neso.frontends.openai import OpenAIOptions, create_app
from neso.server.core import Core
from neso.server.options import ServerOptions
from neso.server.tracing import TraceConfig

TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
PROMPT = "What is paged attention?"
LAYERS = {"compute": ["decode", "prefill"], "pilot": ["compute", "queue"]}
CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            call = pb_utils.InferenceRequest(
                model_name="pilot", inputs=request.inputs(), requested_output_names=["text_output"],
                trace=request.trace(), parameters={"max_tokens": 3},
            )
            answers = [answer for answer in call.exec(decoupled=True) if answer.output_tensors()]
            responses.append(pb_utils.InferenceResponse(answers[-1].output_tensors()))
        return responses
"""
CALLER_CONFIG = """
backend: "python"
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
"""
ENSEMBLE_CONFIG = """
platform: "ensemble"
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
ensemble_scheduling { step {
  model_name: "caller" model_version: -1
  input_map { key: "text_input" value: "text_input" } output_map { key: "text_output" value: "text_output" }
} }
"""


class TracedServer:
    """The ports of the frontends, and their trace collector."""

    def __init__(self, http: KServeHttp, grpc: KServeGrpc, collector: Collector) -> None:
        self.http, self.grpc, self.collector = http.port, grpc.port, collector

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.http}/v1", api_key="none", max_retries=0)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[TracedServer]:
    for name, config, file, content in (
        ("pilot", 'backend: "llm"', "model.json", orjson.dumps({"model": "neso-pilot", "num_blocks": 256})),
        ("caller", CALLER_CONFIG, "model.py", CALLER.encode()),
        ("ensemble", ENSEMBLE_CONFIG, "none", b""),
    ):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
        (tmp_path / name / "1" / file).write_bytes(content)
    with collecting() as collector:
        trace = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=0", f"opentelemetry,url={collector.url}"]
        core = Core(
            ServerOptions(
                (tmp_path,),
                backend_config={"llm": {"in-process": "true"}},
                trace=TraceConfig.parse([*trace, "opentelemetry,bsp_schedule_delay=20"]),
            )
        )
        await core.start()
        assert core.ready(), core.repository_index()
        http, grpc = (
            KServeHttp(core, HttpOptions("127.0.0.1", 0)),
            KServeGrpc(core, GrpcOptions("127.0.0.1", 0)),
        )
        http.mount("/v1", create_app(core, OpenAIOptions()))
        await http.start()
        await grpc.start()
        yield TracedServer(http, grpc, collector)
        await http.stop(1)
        await grpc.stop(1)
        await core.stop()


def check(collector: Collector, path: list[str], usage: tuple[int, int]) -> None:
    """Check that the client's trace is one tree: a request, the models on the `path`, and the last model's spans."""
    tree = {name: [child] for name, child in zip(["", *path], path, strict=False)}
    for model in path[1:-1]:
        if model != "ensemble":
            tree[model] = sorted([*tree[model], "compute"])
    found = collector.tree()
    assert {name: found[name] for name in tree | LAYERS if name != "compute"} == {
        name: children for name, children in (tree | LAYERS).items() if name != "compute"
    }
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert collector.span("InferRequest").parent == HEADERS["traceparent"].split("-")[2]
    attributes = collector.span("pilot").attributes
    assert attributes["gen_ai.request.model"] == "pilot"
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == usage
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    queue, prefill, decode = (collector.span(name) for name in ("queue", "prefill", "decode"))
    assert queue.start <= queue.end == prefill.start < prefill.end == decode.start < decode.end
    assert attributes["gen_ai.response.time_to_first_chunk"] > 0


def text_input(module: Any) -> Any:
    text = module.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([PROMPT.encode()], np.object_))
    return text


def generate(port: int, endpoint: str, begun: Callable[[], None] = lambda: None, **parameters: Any) -> bytes:
    """Return the response; `begun` is called after its first line."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v2/models/pilot/{endpoint}",
        orjson.dumps({"text_input": PROMPT, "temperature": 0, **parameters}),
        HEADERS,
    )
    with urllib.request.urlopen(request) as response:
        first = bytes(response.readline())
        begun()
        return first + bytes(response.read())


async def test_openai_completions(server):
    def complete() -> Any:
        return server.openai().completions.create(
            model="pilot",
            prompt=PROMPT,
            max_tokens=4,
            temperature=0,
            seed=3,
            stop=["@@"],
            extra_headers=HEADERS,
        )

    usage = (await asyncio.to_thread(complete)).usage
    await asyncio.to_thread(server.collector.wait_for, 6)
    check(server.collector, ["InferRequest", "pilot"], (usage.prompt_tokens, 4))
    root, model = (server.collector.span(name) for name in ("InferRequest", "pilot"))
    assert root.events == [
        *("HTTP_RECV_START", "HTTP_RECV_END", "INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END")
    ]
    assert model.attributes["gen_ai.request.max_tokens"] == 4
    assert model.attributes["gen_ai.request.seed"] == 3
    assert model.attributes["gen_ai.request.stop_sequences"] == ["@@"]
    assert model.attributes["gen_ai.response.id"] == model.attributes["triton.request_id"]


async def test_openai_chat_stream(server):
    def chat() -> int:
        stream = server.openai().chat.completions.create(
            model="pilot",
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=4,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=HEADERS,
        )
        return next(chunk.usage.prompt_tokens for chunk in stream if chunk.usage)

    prompt_tokens = await asyncio.to_thread(chat)
    await asyncio.to_thread(server.collector.wait_for, 6)
    check(server.collector, ["InferRequest", "pilot"], (prompt_tokens, 4))


async def test_several_prompts_share_one_request_span(server):
    def complete() -> None:
        server.openai().completions.create(
            model="pilot", prompt=[PROMPT, PROMPT + "?"], max_tokens=2, extra_headers=HEADERS
        )

    await asyncio.to_thread(complete)
    await asyncio.to_thread(server.collector.wait_for, 11)
    assert server.collector.tree()["InferRequest"] == ["pilot", "pilot"]


async def test_generate(server):
    await asyncio.to_thread(generate, server.http, "generate", max_tokens=4)
    await asyncio.to_thread(server.collector.wait_for, 6)
    prompt_tokens = server.collector.span("pilot").attributes["gen_ai.usage.input_tokens"]
    check(server.collector, ["InferRequest", "pilot"], (prompt_tokens, 4))


async def test_generate_stream(server, step_pace):
    step_pace.seconds = 0.2  # until the first part has been read

    def begun() -> None:
        step_pace.seconds = 0.0

    options = {"stream": True, "max_tokens": 100, "ignore_eos": True}
    body = await asyncio.to_thread(generate, server.http, "generate_stream", begun, **options)
    assert body.count(b"data: ") > 1
    await asyncio.to_thread(server.collector.wait_for, 6)
    root = server.collector.span("InferRequest")
    assert root.events.index("HTTP_SEND_START") < root.events.index("INFER_RESPONSE_COMPLETE")
    assert root.events[-1] == "HTTP_SEND_END"


async def test_grpc_stream(server):
    def stream() -> None:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
            client.start_stream(lambda result, error: answers.put((result, error)), headers=dict(HEADERS))
            client.async_stream_infer("pilot", [text_input(triton_grpc)], parameters={"max_tokens": 4})
            _, error = answers.get(timeout=60)
            assert error is None

    await asyncio.to_thread(stream)
    await asyncio.to_thread(server.collector.wait_for, 6)
    prompt_tokens = server.collector.span("pilot").attributes["gen_ai.usage.input_tokens"]
    check(server.collector, ["InferRequest", "pilot"], (prompt_tokens, 4))
    assert server.collector.span("InferRequest").events == [
        *("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "INFER_RESPONSE_COMPLETE"),
        *("GRPC_SEND_START", "GRPC_SEND_END"),
    ]


@pytest.mark.parametrize("module", [triton_http, triton_grpc])
async def test_ensemble_and_nested_calls_are_one_tree(server, module):
    port = server.http if module is triton_http else server.grpc

    def infer() -> None:
        with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
            client.infer("ensemble", [text_input(module)], headers=dict(HEADERS))

    await asyncio.to_thread(infer)
    await asyncio.to_thread(server.collector.wait_for, 9)
    prompt_tokens = server.collector.span("pilot").attributes["gen_ai.usage.input_tokens"]
    check(server.collector, ["InferRequest", "ensemble", "caller", "pilot"], (prompt_tokens, 3))
    receive, send = {triton_http: ("HTTP_RECV", "HTTP_SEND"), triton_grpc: ("GRPC_WAITREAD", "GRPC_SEND")}[
        module
    ]
    assert server.collector.span("InferRequest").events == [
        *(f"{receive}_START", f"{receive}_END", "INFER_RESPONSE_COMPLETE", f"{send}_START", f"{send}_END")
    ]


async def test_disconnect_ends_the_trace(server, step_pace):
    def leave() -> None:
        stream = server.openai().completions.create(
            model="pilot", prompt=PROMPT, max_tokens=400, stream=True, extra_headers=HEADERS
        )
        next(iter(stream))
        stream.close()

    await asyncio.to_thread(leave)
    await asyncio.to_thread(server.collector.wait_for, 6)
    assert "cancelled" in server.collector.span("pilot").error


async def test_rejected_requests_have_no_model_span(server):
    def refused() -> None:
        with pytest.raises(openai.BadRequestError):
            server.openai().completions.create(model="pilot", prompt=PROMPT, n=-1, extra_headers=HEADERS)
        with pytest.raises(openai.NotFoundError):
            server.openai().completions.create(model="nobody", prompt=PROMPT, extra_headers=HEADERS)

    await asyncio.to_thread(refused)
    await asyncio.to_thread(generate, server.http, "generate", max_tokens=2)
    await asyncio.to_thread(
        server.collector.wait_until, lambda: any(span.name == "pilot" for span in server.collector.spans)
    )
    assert [span.name for span in server.collector.spans].count("pilot") == 1
