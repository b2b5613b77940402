"""Request fields as sampling parameters of the engine."""

from __future__ import annotations

from typing import Any

import pytest
from asgi_client import AsgiClient
from scripted_model import ScriptedModel

from neso.generation import SamplingDefaults

FIELDS: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.25,
    "repetition_penalty": 1.5,
    "min_tokens": 1,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}


async def sampling(client: AsgiClient, script: ScriptedModel, body: dict[str, Any]) -> Any:
    path = next(path for field, path in PATHS.items() if field in body)
    response = await client.post(path, {"model": "scripted", **body})
    assert response.status == 200, response.body
    return script.requests[-1].sampling


@pytest.mark.parametrize("body", [{"prompt": "a"}, CHAT])
async def test_fields_with_engine_names(
    client: AsgiClient, script: ScriptedModel, body: dict[str, Any]
) -> None:
    made = await sampling(
        client,
        script,
        {
            **body,
            **FIELDS,
            "stop": "x",
            "stop_token_ids": [3],
            "logit_bias": {"5": -100},
            "priority": 4,
            "cache_salt": "mine",
            "add_special_tokens": True,
        },
    )
    assert {name: getattr(made, name) for name in FIELDS} == FIELDS
    assert (made.stop, made.stop_token_ids, made.logit_bias) == (("x",), (3,), {5: -100.0})
    request = script.requests[-1]
    assert (request.priority, request.cache_salt, request.add_special_tokens) == (4, "mine", True)


@pytest.mark.parametrize("body", [{"prompt": "a"}, CHAT])
async def test_null_is_the_same_as_omitted(
    client: AsgiClient, script: ScriptedModel, body: dict[str, Any]
) -> None:
    plain = await sampling(client, script, body)
    nulls = dict.fromkeys((*FIELDS, "stop", "max_tokens", "logit_bias", "logprobs", "stream", "user"))
    assert await sampling(client, script, {**body, **nulls}) == plain


async def test_max_tokens(client: AsgiClient, script: ScriptedModel) -> None:
    assert (await sampling(client, script, {"prompt": "a"})).max_tokens == 16
    assert (await sampling(client, script, CHAT)).max_tokens is None
    assert (await sampling(client, script, {**CHAT, "max_tokens": 3})).max_tokens == 3
    both = {**CHAT, "max_tokens": 3, "max_completion_tokens": 2}
    assert (await sampling(client, script, both)).max_tokens == 2


async def test_logprobs(client: AsgiClient, script: ScriptedModel) -> None:
    assert (await sampling(client, script, {**CHAT, "logprobs": True})).logprobs == 0
    assert (await sampling(client, script, {**CHAT, "logprobs": True, "top_logprobs": 3})).logprobs == 3
    assert (await sampling(client, script, {**CHAT, "logprobs": False})).logprobs is None
    assert (await sampling(client, script, {"prompt": "a", "logprobs": 2})).prompt_logprobs is None
    assert (await sampling(client, script, {"prompt": "a", "logprobs": 2, "echo": True})).prompt_logprobs == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 10**9}, "n"),
        ({"prompt": "a", "logprobs": -2}, "logprobs"),
        ({"prompt": "a", "logprobs": -1, "echo": True}, "logprobs"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "min_tokens": 20}, "min_tokens"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
        ({"prompt": "a", "top_k": 2**60}, "top_k"),
        ({"prompt": "a", "seed": 2**70}, "seed"),
        ({**CHAT, "max_tokens": 0}, "max_tokens"),
        ({**CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({**CHAT, "logprobs": True, "top_logprobs": -2}, "top_logprobs"),
    ],
)
async def test_invalid_values(
    client: AsgiClient, script: ScriptedModel, body: dict[str, Any], param: str
) -> None:
    path = next(path for field, path in PATHS.items() if field in body)
    response = await client.post(path, {"model": "scripted", **body})
    assert response.status == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param in error["message"]
    assert not script.requests


DEFAULTS = SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.1, max_new_tokens=50)
RESPONSE = {"input": "hi"}


@pytest.mark.parametrize("body", [{"prompt": "a"}, CHAT, RESPONSE])
async def test_model_defaults_apply_to_omitted_fields(
    client: AsgiClient, script: ScriptedModel, body: dict[str, Any]
) -> None:
    script.default_sampling = DEFAULTS
    made = await sampling(client, script, body)
    assert (made.temperature, made.top_k, made.repetition_penalty, made.top_p) == (0.6, 20, 1.1, 1.0)
    made = await sampling(client, script, {**body, "temperature": 1.0, "top_k": 0, "top_p": None})
    assert (made.temperature, made.top_k, made.repetition_penalty, made.top_p) == (1.0, 0, 1.1, 1.0)


async def test_model_default_max_new_tokens(client: AsgiClient, script: ScriptedModel) -> None:
    script.default_sampling = DEFAULTS
    assert (await sampling(client, script, CHAT)).max_tokens == 50
    assert (await sampling(client, script, RESPONSE)).max_tokens == 50
    assert (await sampling(client, script, {"prompt": "a"})).max_tokens == 16
    for body in ({**CHAT, "max_tokens": 90}, {**RESPONSE, "max_output_tokens": 90}):
        assert (await sampling(client, script, body)).max_tokens == 90


async def test_model_limit_of_max_new_tokens(client: AsgiClient, script: ScriptedModel) -> None:
    script.default_sampling = SamplingDefaults(max_new_tokens=9, limits_tokens=True)
    bodies = (CHAT, RESPONSE, {"prompt": "a"}, {**CHAT, "max_completion_tokens": 90})
    for body in (*bodies, {**RESPONSE, "max_output_tokens": 90}, {"prompt": "a", "max_tokens": 90}):
        assert (await sampling(client, script, body)).max_tokens == 9
    assert (await sampling(client, script, {**CHAT, "max_tokens": 3})).max_tokens == 3
    assert (await sampling(client, script, {"prompt": "a", "max_tokens": 0, "echo": True})).max_tokens == 1


async def test_beam_search_ignores_model_defaults(client: AsgiClient, script: ScriptedModel) -> None:
    script.default_sampling = DEFAULTS
    for beams in ({"use_beam_search": True, "best_of": 3}, {"beam_width": 3}):
        made = await sampling(client, script, {**CHAT, **beams})
        assert (made.beam_width, made.temperature, made.top_k) == (3, 1.0, 0)
        assert (made.repetition_penalty, made.max_tokens) == (1.0, 50)


async def test_response_reports_its_sampling(client: AsgiClient, script: ScriptedModel) -> None:
    script.default_sampling = DEFAULTS
    response = await client.post("/v1/responses", {"model": "scripted", **RESPONSE, "top_p": 0.5})
    assert (response.json()["temperature"], response.json()["top_p"]) == (0.6, 0.5)
