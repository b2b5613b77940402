"""Load metrics of the KV cache in the `endpoint-load-metrics` header."""

from __future__ import annotations

import json

import pytest

from neso.server.metrics.model_metrics import KV_CACHE_FAMILY

ROUTES = {
    "/v2/models/text/generate": {"PROMPT": "hi"},
    "/v2/models/text/generate_stream": {"PROMPT": "hi"},
    "/v2/models/text/infer": {
        "inputs": [{"name": "PROMPT", "datatype": "BYTES", "shape": [1], "data": ["hi"]}],
    },
}


@pytest.fixture
def cache(core):
    for kind, value in {"max": 160, "used": 20, "tokens_per": 16}.items():
        core.metrics.watch(KV_CACHE_FAMILY, ("llm", "1", kind), lambda value=value: value)


@pytest.mark.parametrize("path", ROUTES)
async def test_text_and_json(client, cache, path):
    reply = await client.post(path, ROUTES[path], endpoint_load_metrics_format="text")
    assert reply.status == 200
    assert reply.headers["endpoint-load-metrics"] == (
        "TEXT named_metrics.kv_cache_utilization=0.125000, named_metrics.max_token_capacity=2560"
    )
    reply = await client.post(path, ROUTES[path], endpoint_load_metrics_format="JSON")
    form, _, value = reply.headers["endpoint-load-metrics"].partition(" ")
    assert form == "JSON"
    assert json.loads(value) == {"named_metrics": {"kv_cache_utilization": 0.125, "max_token_capacity": 2560}}


@pytest.mark.parametrize("path", ROUTES)
async def test_header_only_on_request_and_in_known_formats(client, core, cache, path):
    for headers in ({}, {"endpoint_load_metrics_format": "xml"}):
        reply = await client.post(path, ROUTES[path], **headers)
        assert reply.status == 200 and "endpoint-load-metrics" not in reply.headers


async def test_no_header_without_language_models(client):
    path = "/v2/models/text/generate"
    reply = await client.post(path, ROUTES[path], endpoint_load_metrics_format="text")
    assert reply.status == 200 and "endpoint-load-metrics" not in reply.headers
