"""Requests beyond the limits of requests in flight."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgi_client import AsgiClient
from eventually import until
from scripted_model import ScriptedModel

from neso.server.admission import AdmissionLimits
from neso.server.core import Core

COMPLETION: dict[str, Any] = {"model": "scripted", "prompt": "a"}
CHAT: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def limits(core: Core) -> None:
    core.admission.limits = AdmissionLimits(request_sequences=3, client_sequences=4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
async def test_client_with_too_many_sequences_is_told_to_wait(
    core: Core, client: AsgiClient, script: ScriptedModel, path: str, body: dict[str, Any], stream: bool
) -> None:
    script.hold = True
    first = asyncio.create_task(client.post("/v1/completions", {**COMPLETION, "n": 3}))
    await until(lambda: core.admission.sequences == 3)
    answer = await client.post(path, {**body, "n": 2, "stream": stream})
    assert answer.status == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    first.cancel()
    await asyncio.wait([first])
    await until(lambda: core.admission.sequences == 0)
    assert core.admission.num_clients == 0


@pytest.mark.parametrize(
    "body",
    [
        {**COMPLETION, "prompt": ["a", "b"], "n": 2},
        {**COMPLETION, "best_of": 4},
        {**COMPLETION, "n": 4, "use_beam_search": True},
        {**COMPLETION, "prompt": ["a"] * 4},
    ],
)
async def test_request_with_too_many_sequences_is_invalid(
    client: AsgiClient, script: ScriptedModel, body: dict[str, Any]
) -> None:
    answer = await client.post("/v1/completions", body)
    assert answer.status == 400
    assert "4 sequences, at most 3 are allowed" in answer.json()["error"]["message"]
    assert not script.requests


async def test_ended_requests_are_not_counted(core: Core, client: AsgiClient) -> None:
    for _ in range(5):
        answer = await client.post("/v1/completions", {**COMPLETION, "n": 3})
        assert answer.status == 200
    assert core.admission.sequences == 0
