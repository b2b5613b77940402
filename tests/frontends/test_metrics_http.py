"""Metrics endpoint."""

from __future__ import annotations

import asyncio
import http.client
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from neso.frontends.frontend_options import MetricsOptions
from neso.frontends.metrics import MetricsHttp
from neso.server.core import Core
from neso.server.metrics.registry import Family
from neso.server.options import ServerOptions


async def test_metrics(tmp_path: Path) -> None:
    core = Core(ServerOptions(model_repository=(tmp_path,)))
    await core.start()
    requests = core.metrics.counter(Family("test_requests_total", "counter", "Requests"))
    requests.labels(model="m", version="1").inc(3)
    metrics = MetricsHttp(core, MetricsOptions("127.0.0.1", 0))
    await metrics.start()

    def get(path: str, method: str = "GET") -> tuple[int, str | None, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", metrics.port, timeout=10)
        connection.request(method, path)
        response = connection.getresponse()
        found = response.status, response.getheader("content-type"), response.read()
        connection.close()
        return found

    status, content_type, body = await asyncio.to_thread(get, "/metrics")
    assert status == 200 and content_type is not None and content_type.startswith("text/plain; version=0.0.4")
    samples = [s for family in text_string_to_metric_families(body.decode()) for s in family.samples]
    assert any(s.name == "test_requests_total" and s.value == 3 for s in samples)
    assert (await asyncio.to_thread(get, "/"))[0] == 404
    assert (await asyncio.to_thread(get, "/metrics", "POST"))[0] == 405
    await metrics.stop()
    await core.stop()
