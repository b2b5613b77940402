"""The OpenAPI document: schemathesis generates requests from it and validates the responses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess

from neso.frontends.openai.openapi import openapi_document
from neso.models import SHIPPED_MODELS

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from checkpoints import make_encoder

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")

from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.config import SchemathesisConfig  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
MODELS = {
    "/v1/embeddings": "embedder",
    "/classify": "reranker",
    "/v1/classify": "reranker",
    "/v1/score": "reranker",
    "/score": "reranker",
    "/v1/rerank": "reranker",
    "/v2/rerank": "reranker",
    "/rerank": "reranker",
    "/v1/ranking": "reranker",
}
STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
LIMITS = {
    "max_tokens": 4,
    "max_completion_tokens": 4,
    "max_output_tokens": 4,
    "n": 3,
    "best_of": 3,
    "beam_width": 3,
    "min_tokens": 4,
}
"""What would only take long is cut to this much."""


def loaded(*, coverage: bool) -> Any:
    config = SchemathesisConfig()
    config.projects.default.phases.coverage.enabled = coverage
    return schemathesis.openapi.from_dict(json.loads(json.dumps(openapi_document())), config=config)


def settings(max_examples: int) -> Any:
    return hypothesis.settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


few, many = loaded(coverage=False), loaded(coverage=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    models = {
        "neso-pilot": SHIPPED_MODELS["neso-pilot"],
        "embedder": make_encoder(root / "embedder", "bert"),
        "reranker": make_encoder(root / "reranker", "xlm-roberta", labels=1),
    }
    with ServerProcess(*(f"{name}={path}" for name, path in models.items())) as process:
        assert process.ports, process.output
        yield process


def meet(case: Any, served: ServerProcess) -> None:
    """Send the case, mostly with existing models and responses, and without long-running requests."""
    body = case.body
    for name, known in {"model": "neso-pilot", "response_id": stored_response(served)}.items():
        if name in (case.path_parameters or {}) and len(str(case.path_parameters[name])) % 3:
            case.path_parameters[name] = known
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            body["model"] = MODELS.get(case.operation.path, "neso-pilot")
        for name, limit in LIMITS.items():
            if isinstance(body.get(name), int) and body[name] > limit:
                body[name] = limit
        limit = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_completion_tokens"}
        if case.operation.path in limit and body.get(limit[case.operation.path]) is None:
            body[limit[case.operation.path]] = 4
    response = send(case, served)
    if response.status_code == 200 and case.operation.path in STREAMS and isinstance(body, dict):
        body["stream"] = True
        send(case, served)


def send(case: Any, served: ServerProcess) -> Any:
    return case.call_and_validate(base_url=served.url("", "openai"), checks=CHECKS, timeout=60)


def stored_response(served: ServerProcess) -> str:
    """Return the id of a stored response, created in the background."""
    global stored_id
    if not stored_id or served.get(f"/v1/responses/{stored_id}", "openai")[0] == 404:
        body = {
            "model": "neso-pilot",
            "input": "Hi",
            "max_output_tokens": 2,
            "background": True,
            "stream": False,
        }
        stored_id = served.post("/v1/responses", body, "openai")[1]["id"]
    return stored_id


stored_id = ""


@few.parametrize()
@settings(12)
def test_responses_match_the_document(case: Any, served: ServerProcess) -> None:
    meet(case, served)


@pytest.mark.slow
@pytest.mark.timeout(900)
@many.parametrize()
@settings(60)
def test_many_more_responses_match_the_document(case: Any, served: ServerProcess) -> None:
    meet(case, served)


def test_server_returns_this_document(served):
    status, body = served.get("/openapi.json", "openai")
    assert status == 200
    assert json.loads(body) == openapi_document()
