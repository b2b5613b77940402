"""OpenTelemetry spans as received by a collector."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import numpy as np
import pytest
from core_requests import collect, send_request
from repository_builder import IDENTITY_TENSORS
from test_trace_files import BROKEN, CALLER, add_ensemble

from neso.server.errors import Unsupported
from neso.server.inference_request import InferenceRequest
from neso.server.tensor import Tensor
from neso.server.tracing import TraceConfig, Tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"
CONTEXT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        contexts = [request.trace().get_context() for request in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([str(context)], np.object_))])
            for context in contexts
        ]
"""
CONTEXT_TENSORS = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""


IN_PROCESS = 'parameters { key: "EXECUTION_MODE" value { string_value: "process" } }'
modes = pytest.mark.parametrize("mode", ["", IN_PROCESS], ids=["thread", "process"])


def config(collector, *settings: str) -> TraceConfig:
    return TraceConfig.parse(
        [
            "mode=opentelemetry",
            "level=TIMESTAMPS",
            f"opentelemetry,url={collector.url}",
            "opentelemetry,bsp_schedule_delay=20",
            *(settings or ("rate=1",)),
        ]
    )


async def send_traced_request(core, model: str, headers: dict[str, str] | None = None, id: str = ""):
    """Send a request like a frontend; return the only response, and whether it was traced."""
    trace = core.tracing.sample(model, (headers or {}).get)
    tensor = Tensor.from_numpy("IN", np.array([0.1, 2], np.float32))
    (response,) = await collect(
        core.model(model).submit(InferenceRequest(model, {"IN": tensor}, id=id, trace=trace))
    )
    if trace is not None:
        trace.stamp("HTTP_SEND_END")
        trace.end()
    return response, trace is not None


async def test_a_request_has_three_spans(collector, start_core, repository):
    repository.add("identity")
    core = await start_core(
        trace=config(
            collector, "rate=1", "opentelemetry,resource=service.name=mine", "opentelemetry,resource=a=b"
        )
    )
    before = time.time_ns()
    await send_traced_request(core, "identity", id="r")
    await asyncio.to_thread(collector.wait_for, 3)
    assert collector.tree() == {"": ["InferRequest"], "InferRequest": ["identity"], "identity": ["compute"]}
    assert (collector.resource["service.name"], collector.resource["a"]) == ("mine", "b")
    root, model, compute = (collector.span(name) for name in ("InferRequest", "identity", "compute"))
    assert root.events == ["INFER_RESPONSE_COMPLETE", "HTTP_SEND_END"]
    assert model.events == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert compute.events == ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
    assert model.attributes["triton.model_name"] == "identity"
    assert model.attributes["triton.model_version"] == 1
    assert model.attributes["triton.request_id"] == "r"
    assert model.attributes["triton.trace_parent_id"] == 0
    assert before <= root.start <= model.start <= compute.start <= compute.end <= model.end <= root.end
    assert root.end <= time.time_ns()
    assert (root.kind, root.parent) == (2, "")  # server span without a parent


async def test_settings_contain_the_collector_options(collector, start_core, repository):
    core = await start_core(trace=config(collector, "rate=0", "opentelemetry,resource=a=b"))
    assert core.trace_settings() == {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": "0",
        "trace_count": "-1",
        "trace_mode": "opentelemetry",
        "url": collector.url,
        "resource": ["a=b"],
        "bsp_max_queue_size": "2048",
        "bsp_schedule_delay": "20",
        "bsp_max_export_batch_size": "512",
    }
    core.tracing.update({"trace_rate": ["1"]})
    assert core.tracing.sample("any") is not None


async def test_a_delay_of_0_exports_without_waiting(collector, start_core, repository):
    repository.add("identity")
    core = await start_core(trace=config(collector, "rate=1", "opentelemetry,bsp_schedule_delay=0"))
    assert core.trace_settings()["bsp_schedule_delay"] == "0"
    await send_traced_request(core, "identity")
    await asyncio.to_thread(collector.wait_for, 3)


async def test_a_batch_size_of_1_exports_each_span_alone(collector, start_core, repository):
    repository.add("identity")
    core = await start_core(trace=config(collector, "rate=1", "opentelemetry,bsp_max_export_batch_size=1"))
    await send_traced_request(core, "identity")
    await asyncio.to_thread(collector.wait_for, 3)
    assert collector.messages == 3


async def test_a_queue_smaller_than_a_batch_drops_spans(collector, start_core, repository):
    repository.add("identity")
    settings = ("rate=1", "opentelemetry,bsp_max_queue_size=1", "opentelemetry,bsp_schedule_delay=60000")
    core = await start_core(trace=config(collector, *settings))
    assert core.trace_settings()["bsp_max_export_batch_size"] == "512"
    for _ in range(20):
        await send_traced_request(core, "identity")
    await core.stop()
    assert 1 <= len(collector.spans) < 60


async def test_rate_0_traces_requests_with_a_sampled_parent(collector, start_core, repository):
    repository.add("identity")
    core = await start_core(trace=config(collector, "rate=0"))
    assert core.tracing.enabled
    for headers in ({}, {"traceparent": "nonsense"}, {"traceparent": UNSAMPLED}):
        assert not (await send_traced_request(core, "identity", headers))[1]
    _, traced = await send_traced_request(core, "identity", {"traceparent": PARENT, "tracestate": "a=b"})
    assert traced
    await asyncio.to_thread(collector.wait_for, 3)
    assert {span.trace_id for span in collector.spans} == {PARENT.split("-")[1]}
    assert collector.span("InferRequest").parent == PARENT.split("-")[2]


async def test_a_parent_is_followed_when_the_count_is_used_up(collector, start_core, repository):
    repository.add("identity")
    core = await start_core(trace=config(collector, "rate=1", "count=1"))
    traced = [(await send_traced_request(core, "identity"))[1] for _ in range(2)]
    assert traced == [True, False] and core.tracing.enabled
    assert (await send_traced_request(core, "identity", {"traceparent": PARENT}))[1]


async def test_level_off_traces_nothing(collector, start_core, repository):
    core = await start_core(trace=config(collector, "rate=1", "level=OFF"))
    assert not core.tracing.enabled
    assert core.tracing.sample("m", {"traceparent": PARENT}.get) is None


@modes
async def test_ensemble_and_model_calls_are_one_tree(collector, start_core, repository, mode):
    repository.add("identity")
    caller = CALLER.replace("assert request.trace().get_context() is None", "pass")
    repository.add("second", caller, IDENTITY_TENSORS + mode)
    add_ensemble(repository)
    core = await start_core(trace=config(collector))
    await send_traced_request(core, "both", {"traceparent": PARENT})
    # Two models; one calls the other once with its trace and once without.
    await asyncio.to_thread(collector.wait_for, 8)
    assert {span.trace_id for span in collector.spans} == {PARENT.split("-")[1]}
    assert collector.tree() == {
        "": ["InferRequest"],
        "InferRequest": ["both"],
        "both": ["identity", "second"],
        "second": ["compute", "identity"],
        "identity": ["compute", "compute"],
    }


@modes
async def test_trace_context_of_a_python_model(collector, start_core, repository, mode):
    repository.add("context", CONTEXT, CONTEXT_TENSORS + mode)
    core = await start_core(trace=config(collector, "rate=0"))
    response, _ = await send_traced_request(core, "context", {"traceparent": PARENT, "tracestate": "a=b"})
    (text,) = response.output("OUT").strings()
    await asyncio.to_thread(collector.wait_for, 3)
    span = collector.span("context")
    assert json.loads(text) == {"traceparent": f"00-{span.trace_id}-{span.id}-01", "tracestate": "a=b"}
    response, _ = await send_traced_request(core, "context")
    assert response.output("OUT").strings() == ["None"]


async def test_errors_are_recorded(collector, start_core, repository, caplog):
    repository.add("broken", BROKEN)
    core = await start_core(trace=config(collector))
    await send_traced_request(core, "broken", id="r")
    await asyncio.to_thread(collector.wait_for, 3)
    assert "ValueError: so" in collector.span("broken").error
    assert "ValueError: so" in collector.span("InferRequest").error
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (record.model, record.request_id) == ("broken", "r")
    assert record.trace_id == collector.span("broken").trace_id


async def test_the_last_spans_are_sent_when_the_server_stops(collector, start_core, repository):
    repository.add("identity")
    core = await start_core(trace=config(collector, "rate=1", "opentelemetry,bsp_schedule_delay=60000"))
    await send_traced_request(core, "identity")
    assert not collector.spans
    await core.stop()
    assert len(collector.spans) == 3


async def test_requests_succeed_without_a_collector(start_core, repository, monkeypatch):
    monkeypatch.setattr("neso.server.tracing.otel.FLUSH_TIMEOUT", 0.2)
    repository.add("identity")
    settings = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=1", "opentelemetry,url=http://127.0.0.1:9"]
    core = await start_core(trace=TraceConfig.parse(settings))
    response, _ = await send_traced_request(core, "identity")
    assert response.error is None
    await asyncio.wait_for(core.stop(), 60)


async def test_unsampled_requests_have_no_trace(collector, start_core, repository):
    repository.add("identity")
    core = await start_core(trace=config(collector, "rate=1000"))
    stream = send_request(core.model("identity"), IN=np.ones(1, np.float32))
    assert stream.trace is None
    await collect(stream)


def test_missing_library_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "neso.server.tracing.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(Unsupported, match=r"pip install 'neso-server\[otel\]'"):
        Tracing(TraceConfig.parse(["mode=opentelemetry"]))
