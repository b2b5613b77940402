"""An OpenTelemetry collector over HTTP that stores the received spans."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class Span:
    name: str
    trace_id: str
    id: str
    parent: str
    kind: int
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[str]
    error: str


class Collector:
    """`spans` in order of arrival; `resource` of the last message."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}
        self.messages = 0

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        message = ExportTraceServiceRequest.FromString(body)
        self.messages += 1
        for of_resource in message.resource_spans:
            self.resource = _attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += [_span(span) for span in of_scope.spans]

    def span(self, name: str) -> Span:
        """Return the only span with this name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def tree(self) -> dict[str, list[str]]:
        """Return child names by parent name; spans without a received parent are under ""."""
        names = {span.id: span.name for span in self.spans}
        tree: dict[str, list[str]] = {}
        for span in self.spans:
            tree.setdefault(names.get(span.parent, ""), []).append(span.name)
        return {parent: sorted(children) for parent, children in tree.items()}

    def wait_for(self, count: int, timeout: float = 60.0) -> None:
        """Wait until this many spans have arrived."""
        self.wait_until(lambda: len(self.spans) >= count, timeout)
        assert len(self.spans) == count, sorted(span.name for span in self.spans)

    def wait_until(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, sorted(span.name for span in self.spans)
            time.sleep(0.01)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free port. Skips the test if OpenTelemetry is not installed."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs neso-server[otel]")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            collector.take(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            """Do not log to standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield collector
    server.shutdown()
    server.server_close()
    thread.join()


def _span(span: Any) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        [event.name for event in span.events],
        span.status.message,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(element) for element in value.array_value.values]
    return getattr(value, kind)
