"""Traces of requests on workers, in real processes: one id through queue, prefill, transfer and decode."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from cluster_server import MODEL, ClusterServer
from eventually import wait_until
from server_process import ServerProcess
from shared_workers import Nats, Process, needs_nats, worker
from step_pace import slow_children
from test_stages import SUM, WIDEN, write_ensemble, write_model

sys.path.append(str(Path(__file__).parent.parent / "server/tracing"))
from otlp_collector import Collector, Span, collecting
from trace_reader import ReadTrace, check_order, read_traces

pytestmark = pytest.mark.slow

TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
GREEDY = {"temperature": 0.0, "extra_headers": HEADERS}
TEXT = " traces. " + "Servers have queues, and workers pull from them. " * 30


def options(collector: Collector) -> tuple[str, ...]:
    """Trace only requests that belong to a trace of the client."""
    return (
        "--trace-config=mode=opentelemetry",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=0",
        f"--trace-config=opentelemetry,url={collector.url}",
        "--trace-config=opentelemetry,bsp_schedule_delay=20",
    )


def parts(collector: Collector) -> list[Span]:
    """Return the spans of workers in order of their ends."""
    found = [span for span in collector.spans if "neso.worker" in span.attributes]
    return sorted(found, key=lambda span: (span.attributes["neso.attempt"], span.end))


def names(spans: list[Span]) -> list[tuple[str, str]]:
    return [(span.name, span.attributes["neso.worker"].split("-")[-2]) for span in spans]


def check_transfer(collector: Collector, num_tokens: int) -> None:
    """Check the spans of a request whose prompt another worker has computed."""
    collector.wait_until(lambda: any(span.name == "InferRequest" for span in collector.spans))
    spans = parts(collector)
    assert sorted(names(spans)) == [
        ("decode", "decode"),
        ("kv_transfer", "decode"),
        ("prefill", "decode"),
        ("prefill", "prefill"),
        ("queue", "decode"),
    ]
    assert {span.trace_id for span in collector.spans} == {TRACE}
    by_name = dict(zip(names(spans), spans, strict=True))
    transfer = by_name["kv_transfer", "decode"].attributes
    assert transfer["neso.bytes"] > 0 and transfer["neso.blocks"] > 0
    assert (transfer["neso.missing_blocks"], transfer["neso.transport"]) == (0, "shm")
    decode = by_name["decode", "decode"]
    assert (decode.attributes["neso.tokens"], decode.attributes["neso.attempt"]) == (num_tokens, 1)
    # Times of different workers cannot be compared: they are known to the delay of a message.
    assert by_name["queue", "decode"].start <= by_name["prefill", "prefill"].start
    assert by_name["kv_transfer", "decode"].end <= decode.end


def test_spans_of_prefill_and_decode_workers_and_of_a_lost_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slow_children(monkeypatch, tmp_path)
    with collecting() as collector:
        roles = ("--prefill-workers=1", "--decode-workers=1", "--min-remote-prefill=64")
        with ServerProcess(MODEL, *roles, *options(collector), "--log-verbose=1") as server:
            cluster = ClusterServer(server, 20)
            cluster.stream(f"1 {TEXT}", GREEDY)
            check_transfer(collector, 20)
            # Requests in the logs of the server and of its workers have the same id.
            (grant,) = [line for line in server.output.splitlines() if "decode-1' generates" in line]
            request = grant.split("request ")[1].split(",")[0]
            for name in ("prefill-0", "decode-1"):
                wait_until(
                    lambda name=name: f"{name}: request {request}, attempt 1 has ended" in server.output
                )
            assert f"(trace 00-{TRACE}-" in server.output

            collector.spans.clear()
            cluster.stream("not traced", {"temperature": 0.0})
            cluster.length = 40
            children = psutil.Process(server.process.pid).children()
            (decode,) = (child for child in children if '"name":"decode-1"' in child.cmdline()[-1])
            cluster.stream("What is TTFT?", GREEDY, lambda: decode.send_signal(signal.SIGKILL))
            collector.wait_until(lambda: any(span.name == "InferRequest" for span in collector.spans))
            spans = parts(collector)
            expected = [
                ("queue", 1),
                ("prefill", 1),
                ("decode", 1),
                ("queue", 2),
                ("prefill", 2),
                ("decode", 2),
            ]
            assert [(span.name, span.attributes["neso.attempt"]) for span in spans] == expected
            assert "has ended" in spans[2].error and not spans[5].error
            assert sum(span.attributes["neso.tokens"] for span in (spans[2], spans[5])) >= 40
            assert {span.trace_id for span in collector.spans} == {TRACE}


@contextmanager
def shared_worker(url: str, role: str) -> Iterator[Process]:
    process = worker(url, f"{role}-0", f"--roles={role}", "--log-verbose=1")
    try:
        yield process
    finally:
        process.end()


@needs_nats
def test_spans_of_workers_that_have_joined_over_nats(tmp_path: Path):
    nats = Nats(tmp_path)
    try:
        with (
            collecting() as collector,
            shared_worker(nats.url, "prefill") as prefill,
            shared_worker(nats.url, "decode") as decode,
            ServerProcess(
                MODEL, f"--worker-address={nats.url}", "--min-remote-prefill=64", *options(collector)
            ) as server,
        ):
            cluster = ClusterServer(server, 20)
            wait_until(lambda: cluster.count("workers") == 2)
            cluster.stream(f"1 {TEXT}", GREEDY)
            check_transfer(collector, 20)
            for process in (prefill, decode):
                wait_until(lambda process=process: f"(trace 00-{TRACE}-" in process.output)
    finally:
        nats.process.end()


def test_trace_file_has_the_work_of_workers_as_executions_of_their_own(tmp_path: Path):
    repository = tmp_path / "models"
    write_model(repository, "widen", WIDEN)
    write_model(repository, "sum", SUM)
    write_ensemble(repository, "chain", "widen", "sum")
    path = tmp_path / "trace.json"
    trace = ("--trace-config=level=TIMESTAMPS", "--trace-config=rate=1", f"--trace-config=triton,file={path}")
    stages = (f"--model-repository={repository}", "--stage=widen=1", "--stage=sum=1")
    with ServerProcess(MODEL, "--workers=1", *stages, *trace) as server:
        body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}]}
        status, reply = server.post("/v2/models/chain/infer", body)
        assert status == 200 and reply["outputs"][0]["data"] == [150_000.0, 1.0]
        body = {"text_input": "What is TTFT?", "max_tokens": 8, "ignore_eos": True}
        status, reply = server.post(f"/v2/models/{MODEL}/generate", {**body, "id": "mine"})
        assert status == 200, reply
    traces = {one.model: one for one in read_traces(path)}
    for parent, children in {
        "widen": ("queue", "execute"),
        "sum": ("queue", "tensor_transfer", "execute"),
        MODEL: ("queue", "prefill", "decode"),
    }.items():
        check_order(traces[parent].timestamps)
        for name in children:
            check_child(traces[parent], traces[f"{parent}:{name}"])
    heads = {entry["model_name"]: entry for entry in json.loads(path.read_text()) if "model_name" in entry}
    assert heads[f"{MODEL}:decode"]["worker"] == "worker-0"
    assert heads[f"{MODEL}:decode"]["tokens"] == 8
    assert heads["sum:tensor_transfer"]["bytes"] == 400_000


def check_child(parent: ReadTrace, child: ReadTrace) -> None:
    assert child.parent_id == parent.id
    assert child.timestamps["REQUEST_START"] <= child.timestamps["REQUEST_END"]
    assert parent.timestamps["REQUEST_START"] <= child.timestamps["REQUEST_START"]
