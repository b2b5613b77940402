"""Error responses."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from asgi_client import AsgiClient, AsgiResponse
from pydantic import ValidationError
from scripted_model import ScriptedBackend, ScriptedModel
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.frontends.openai import OpenAIOptions, check_model_config, create_app, routing
from neso.frontends.openai.completions import CompletionRequest
from neso.frontends.openai.errors import ApiError
from neso.frontends.openai.routing import parse_body
from neso.generation import InvalidParameter
from neso.server import backend
from neso.server.core import Core
from neso.server.errors import InternalError, Restarting, Unavailable
from neso.server.options import ServerOptions

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
ASK = {"model": "scripted", "prompt": "a"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def check(response: AsgiResponse, status: int, param: str | None = None, code: str | None = None) -> str:
    """Return the message of an error after checking its status and type."""
    assert response.status == status, response.body
    assert response.complete
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"]
    return str(error["message"])


async def test_unknown_model(client: AsgiClient) -> None:
    for path, body in ((COMPLETIONS, ASK), (CHAT, HI)):
        message = check(await client.post(path, {**body, "model": "a/b"}), 404, "model", "model_not_found")
        assert "'a/b'" in message


async def test_model_without_text(client: AsgiClient) -> None:
    for path, body in ((COMPLETIONS, ASK), (CHAT, HI)):
        message = check(await client.post(path, {**body, "model": "adder"}), 400, "model")
        assert "not a language model" in message


async def test_unknown_route_and_wrong_method(client: AsgiClient) -> None:
    assert "/v1/nope" in check(await client.get("/v1/nope"), 404, code="unknown_url")
    response = await client.get(CHAT)
    check(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff", b"null"])
async def test_malformed_bodies(client: AsgiClient, body: bytes) -> None:
    check(await client.request("POST", CHAT, body), 400)
    check(await client.request("POST", COMPLETIONS, body), 400)


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, {"model": "scripted"}, "messages", "missing_required_parameter"),
        (CHAT, {"messages": HI["messages"]}, "model", "missing_required_parameter"),
        (COMPLETIONS, {"model": "scripted"}, "prompt", "missing_required_parameter"),
        (CHAT, {**HI, "messages": []}, "messages", None),
        (CHAT, {**HI, "messages": [{"role": "king"}]}, "messages[0].role", None),
        (CHAT, {**HI, "messages": [{"role": "user", "content": 3}]}, "messages[0].content", None),
        (CHAT, {**HI, "messages": [{"role": "tool", "content": "x"}]}, "messages", None),
        (CHAT, {**HI, "temperature": "hot"}, "temperature", None),
        (CHAT, {**HI, "tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        (CHAT, {**HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", None),
        (CHAT, {**HI, "top_logprobs": 3}, "top_logprobs", None),
        (CHAT, {**HI, "tool_choice": "auto"}, "tool_choice", None),
        (CHAT, {**HI, "stream_options": {"include_usage": True}}, "stream_options", None),
        (COMPLETIONS, {**ASK, "prompt": []}, "prompt", None),
        (COMPLETIONS, {**ASK, "prompt": [[1], []]}, "prompt", None),
        (COMPLETIONS, {**ASK, "prompt": 3}, "prompt", None),
        (COMPLETIONS, {**ASK, "prompt": [1, "a"]}, "prompt[1]", None),
        (COMPLETIONS, {**ASK, "prompt": [[1], [-1]]}, "prompt[1][0]", None),
        (COMPLETIONS, {**ASK, "prompt": [2**31]}, "prompt[0]", None),
        (COMPLETIONS, {**ASK, "prompt": ["a"] * 3000}, "prompt", None),
    ],
)
async def test_invalid_requests(
    client: AsgiClient, path: str, body: dict[str, Any], param: str, code: str | None
) -> None:
    assert param.partition("[")[0] in check(await client.post(path, body), 400, param, code)


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        (CHAT, {"functions": [{}]}),
        (COMPLETIONS, {"suffix": "end"}),
        (COMPLETIONS, {"max_new_tokens": 2}),
    ],
)
async def test_unsupported_fields_are_rejected(client: AsgiClient, path: str, extra: dict[str, Any]) -> None:
    body = HI if path == CHAT else ASK
    check(await client.post(path, {**body, **extra}), 400, next(iter(extra)), "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        (CHAT, {"response_format": {"type": "text"}, "store": True, "metadata": {"a": "b"}}),
        (CHAT, {"guided_json": None, "new_in_2030": [1, 2]}),
        (COMPLETIONS, {"suffix": "", "best_of": 2, "n": 2, "user": "me"}),
    ],
)
async def test_fields_without_effect_are_accepted(
    client: AsgiClient, path: str, extra: dict[str, Any]
) -> None:
    body = HI if path == CHAT else ASK
    assert (await client.post(path, {**body, **extra})).status == 200


async def test_too_long_prompts(client: AsgiClient) -> None:
    long = "hello " * 1100
    code = "context_length_exceeded"
    for extra in ({}, {"stream": True}):
        response = await client.post(COMPLETIONS, {**ASK, **extra, "prompt": long})
        assert "1000 tokens" in check(response, 400, "prompt", code)
        response = await client.post(COMPLETIONS, {**ASK, **extra, "prompt": [[5], [5] * 1000]})
        assert check(response, 400, "prompt", code) == (
            "This model's maximum context length is 1000 tokens, of which at least one must be left for the output; "
            "'prompt' is 1000 tokens long."
        )
        response = await client.post(CHAT, {**HI, **extra, "messages": [{"role": "user", "content": long}]})
        check(response, 400, "messages", code)


async def test_engine_rejection(client: AsgiClient, script: ScriptedModel) -> None:
    script.error = InvalidParameter("top_k", "is not served by this runner")
    assert "runner" in check(await client.post(COMPLETIONS, ASK), 400, "top_k")
    for field, path, body, param in (
        ("prompt_logprobs", COMPLETIONS, ASK, "logprobs"),
        ("logprobs", CHAT, {**HI, "logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ("logprobs", CHAT, {**HI, "logprobs": True}, "logprobs"),
    ):
        script.error = InvalidParameter(field, "must be at most 20")
        assert "at most 20" in check(await client.post(path, body), 400, param)
    script.error = InvalidParameter("prompt", "token 999 is not in the vocabulary")
    check(await client.post(COMPLETIONS, ASK), 400, "prompt")
    check(await client.post(CHAT, HI), 400, "messages")


@pytest.mark.parametrize(("error", "retry"), [(Restarting("not now"), "1"), (Unavailable("not now"), None)])
async def test_dead_engine(
    client: AsgiClient, script: ScriptedModel, error: Exception, retry: str | None
) -> None:
    script.error = error
    for extra in ({}, {"stream": True}):
        response = await client.post(CHAT, {**HI, **extra})
        assert str(error) in check(response, 503)
        assert response.headers.get("retry-after") == retry


@pytest.mark.parametrize("error", [RuntimeError("secret"), KeyError("secret")])
async def test_unexpected_errors_hide_their_text(
    client: AsgiClient, script: ScriptedModel, error: Exception
) -> None:
    script.error = error
    response = await client.post(COMPLETIONS, ASK)
    check(response, 500)
    assert b"secret" not in response.body
    assert b"Traceback" not in response.body


@pytest.mark.parametrize(
    ("error", "type"), [(InternalError("broken"), "server_error"), (OSError("x"), "server_error")]
)
@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, HI), (COMPLETIONS, ASK), (COMPLETIONS, {**ASK, "prompt": ["a", "b"]})]
)
async def test_error_in_a_stream(
    client: AsgiClient, script: ScriptedModel, error: Exception, type: str, path: str, body: dict[str, Any]
) -> None:
    script.error, script.fail_after = error, 1
    response = await client.post(path, {**body, "stream": True})
    assert (response.status, response.complete) == (200, True)
    *chunks, last = response.events()
    assert chunks
    assert last["error"]["type"] == type
    assert len(script.aborted) == len(script.requests)


async def test_too_large_body(client: AsgiClient) -> None:
    big = b" " * 100_001
    headers = ((b"content-length", b"100001"),)
    code = "content_too_large"
    check(await client.request("POST", CHAT, b"", headers=headers), 413, code=code)
    check(await client.request("POST", CHAT, big[:60_000], big[60_000:]), 413, code=code)


async def test_compressed_body(client: AsgiClient) -> None:
    body = json.dumps(ASK).encode()
    for path in (COMPLETIONS, "/tokenize"):
        response = await client.request(
            "POST", path, gzip.compress(body), headers=((b"content-encoding", b"gzip"),)
        )
        assert "gzip" in check(response, 415, code="unsupported_content_encoding")
    plain = ((b"content-encoding", b"identity"),)
    assert (await client.request("POST", COMPLETIONS, body, headers=plain)).status == 200


async def test_body_in_pieces(client: AsgiClient) -> None:
    response = await client.request("POST", COMPLETIONS, b'{"model": "scri', b'pted", "prompt": ', b'"a"}')
    assert response.status == 200


async def test_stopping_server(client: AsgiClient, core: Core) -> None:
    await core.stop()
    check(await client.post(CHAT, HI), 503)


def test_unknown_tool_parser(core: Core) -> None:
    with pytest.raises(ValueError, match="unknown tool call parser 'x'"):
        create_app(core, OpenAIOptions(tool_call_parser="x"))


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        ("tool_call_parser", "x", "model 'm': unknown tool call parser 'x'"),
        ("reasoning_parser", "x", "model 'm': unknown reasoning parser 'x'"),
        ("tool_call_parser", "hermes", ""),
        ("reasoning_parser", "none", ""),
    ],
)
async def test_parser_in_model_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameter: str, value: str, message: str
) -> None:
    """An unknown parser fails loading."""
    monkeypatch.setitem(backend.BUILTIN, "scripted", "scripted_model:ScriptedBackend")
    monkeypatch.setattr(ScriptedBackend, "scripts", {})
    core = Core(ServerOptions((), config_checks=(check_model_config,)))
    config = ModelConfig(name="m", backend="scripted")
    config.parameters[parameter].string_value = value
    core.add_model("m", config, tmp_path)
    await core.start()
    (entry,) = core.repository_index()
    assert message in entry.reason
    assert core.model_ready("m") is not bool(message)
    await core.stop()


async def test_disconnect_before_the_request_is_complete(
    client: AsgiClient, caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("/tokenize", "/v1/load_lora_adapter", "/v1/models/scripted/unload"):
        await client.request("POST", path, disconnect_after=0)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a" * 20_000}),
        ("/v1/responses/input_tokens", {"input": "a" * 20_000}),
        ("/v1/responses", {"input": "a" * 20_000, "truncation": "auto"}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 20_000}], "truncate_prompt_tokens": -1}),
        (COMPLETIONS, {"prompt": "a" * 20_000, "truncate_prompt_tokens": -1}),
    ],
)
async def test_long_text_is_tokenized_in_a_thread(
    client: AsgiClient, script: ScriptedModel, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    encode, threads = script.text.encode, list[threading.Thread]()

    def noted(text: str, *, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread())
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(script.text, "encode", noted)
    monkeypatch.setattr(script, "generate", None)  # only the frontend tokenizes
    await client.post(path, {"model": "scripted", **body})
    assert threads and threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt":[' + b"1," * 1_000_001 + b"1]}", "The body has more than 1000000 values."),
        (b'{"prompt":[' + b'"",' * 50_001 + b'""]}', "The body has more than 50000 strings."),
        (b'{"x":[' + b"[]," * 50_001 + b"[]]}", "The body has more than 50000 objects and arrays."),
    ],
)
def test_number_of_values_is_limited(body: bytes, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(body, CompletionRequest, 1_000_000)
    assert caught.value.status == 400 and caught.value.message == message


def test_values_in_strings_are_not_counted() -> None:
    text = '[1,{"a\\\\":2},' * 200_000
    assert (
        parse_body(json.dumps({"model": "m", "prompt": text}).encode(), CompletionRequest, 1_000_000).prompt
        == text
    )


def test_only_the_first_invalid_item_of_a_list_is_reported() -> None:
    body = b'{"model":"m","prompt":[' + b"1," * 900_000 + b'"a",' * 10_000 + b'"a"]}'
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate_json(body)
    assert caught.value.error_count() < 10


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":[1,2.0,"3"],"seed":1e400}',
        b'{"model":"m","prompt":["1","2"],"logit_bias":{"5":1},"temperature":"0.5","stream":"true"}',
        b'{"model":"m","prompt":[[1,2],[3]],"seed":12345678901234567890123,"x":NaN}',
        b'{"model":"m","prompt":"a","n":"many","stop":[1]}',
        b'{"model":"m","prompt":"\\ud800"}',
        b'{"model":"m","prompt":"a","prompt":"b"} x',
        b'{"model":"m",',
        b"[1]",
        b"null",
        b'{"model":"\xff"}',
    ],
)
def test_large_bodies_are_validated_like_small_ones(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def result() -> object:
        try:
            return parse_body(body, CompletionRequest, 1_000_000).model_dump()
        except ApiError as error:
            return error.message

    small = result()
    monkeypatch.setattr(routing, "LARGE_JSON", 0)
    assert repr(result()) == repr(small)  # NaN is not equal to NaN
