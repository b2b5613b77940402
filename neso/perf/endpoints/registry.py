"""Endpoints by the name of `--endpoint-type`."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from neso.perf.client.target import Target
from neso.perf.endpoints.base import HttpEndpoint
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.errors import PerfError

_ENTRY_POINTS = "neso.perf.endpoints"

HTTP_ENDPOINTS = {
    "chat": "neso.perf.endpoints.openai:ChatEndpoint",
    "vision": "neso.perf.endpoints.openai:ChatEndpoint",
    "multimodal": "neso.perf.endpoints.openai:ChatEndpoint",
    "completions": "neso.perf.endpoints.openai:CompletionsEndpoint",
    "responses": "neso.perf.endpoints.openai:ResponsesEndpoint",
    "embeddings": "neso.perf.endpoints.openai:EmbeddingsEndpoint",
    "nim_embeddings": "neso.perf.endpoints.openai:EmbeddingsEndpoint",
    "rankings": "neso.perf.endpoints.rankings:NimRankingsEndpoint",
    "nim_rankings": "neso.perf.endpoints.rankings:NimRankingsEndpoint",
    "cohere_rankings": "neso.perf.endpoints.rankings:CohereRankingsEndpoint",
    "hf_tei_rankings": "neso.perf.endpoints.rankings:TeiRankingsEndpoint",
    "generate": "neso.perf.endpoints.generate:TritonGenerateEndpoint",
    "huggingface_generate": "neso.perf.endpoints.generate:HuggingFaceGenerateEndpoint",
    "kserve_http": "neso.perf.endpoints.kserve:KServeHttpEndpoint",
}
"""Modules and classes of HTTP endpoints, imported on first use."""
TARGETS = {
    "kserve": "neso.perf.client.grpc:GrpcTarget",
    "kserve_grpc": "neso.perf.client.grpc:GrpcTarget",
    "dynamic_grpc": "neso.perf.client.grpc:GrpcTarget",
    "engine": "neso.perf.client.engine:EngineTarget",
    "tensorrtllm_engine": "neso.perf.client.engine:EngineTarget",
}
"""Modules and classes of the targets other than HTTP; each has `open(options)`."""


def endpoint_types() -> list[str]:
    """Return the names of all endpoint types, with those of installed packages."""
    return [*HTTP_ENDPOINTS, *TARGETS, *(point.name for point in entry_points(group=_ENTRY_POINTS))]


def endpoint_class(name: str) -> Any:
    """Return the class of an endpoint type, or of MODULE:CLASS. Raises `PerfError`."""
    place = HTTP_ENDPOINTS.get(name, name)
    for point in entry_points(group=_ENTRY_POINTS):
        if point.name == name:
            place = point.value
    if ":" not in place:
        raise PerfError(f"--endpoint-type: unknown type '{name}'; known are {', '.join(endpoint_types())}")
    found = _load(place)
    if not (isinstance(found, type) and issubclass(found, HttpEndpoint)):
        raise PerfError(f"--endpoint-type: '{place}' is no subclass of neso.perf.api.HttpEndpoint")
    return found


def _load(place: str) -> Any:
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PerfError(f"--endpoint-type: '{place}' cannot be loaded: {error}") from None


def check_endpoint_type(name: str) -> None:
    """Raises `PerfError` if there is no such endpoint type."""
    if name not in TARGETS:
        endpoint_class(name)


async def open_target(options: EndpointOptions) -> Target:
    """Open the target of the options in the running event loop. Raises `PerfError`."""
    from neso.perf.client.http import HttpTarget

    if options.endpoint_type in TARGETS:
        target: Target = await _load(TARGETS[options.endpoint_type]).open(options)
        return target
    endpoint = endpoint_class(options.endpoint_type)(options)
    return HttpTarget(endpoint, options)
