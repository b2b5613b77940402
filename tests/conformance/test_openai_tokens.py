"""Tokenization of texts and chats, and small routes that vLLM's clients use."""

from __future__ import annotations

import json

import pytest

import neso

MODEL = "neso-pilot"
CHAT = [{"role": "user", "content": "What is TTFT?"}]


@pytest.fixture(params=[("openai", ""), ("openai", "/v1"), ("http", "/v1")], ids=lambda place: "".join(place))
def post(server, request):
    port, prefix = request.param

    def send(path, body, status=200):
        got, response = server.post(prefix + path, body, port)
        assert got == status, response
        return response

    return send


def test_tokenize_and_detokenize_round_trip(post, llm):
    text = "Grüße, what is ☃?"
    reported = post("/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True})
    assert reported["tokens"] == llm.tokenizer.encode(text)
    assert reported["count"] == len(reported["tokens"]) == len(reported["token_strs"])
    assert reported["max_model_len"] == 2048
    assert post("/detokenize", {"model": MODEL, "tokens": reported["tokens"]})["prompt"].endswith(text)


def test_model_is_optional_for_a_single_model(post):
    reported = post("/tokenize", {"prompt": "Hi"})
    assert reported["token_strs"] is None
    assert post("/detokenize", {"tokens": reported["tokens"]})["prompt"].endswith("Hi")


def test_chat_tokens_equal_prompt_tokens(post, server):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    for extra in ({}, {"tools": [tool]}, {"chat_template_kwargs": {}}):
        reported = post("/tokenize", {"model": MODEL, "messages": CHAT, **extra})
        tools = {name: value for name, value in extra.items() if name == "tools"}
        body = {"model": MODEL, "messages": CHAT, "max_tokens": 1, **tools}
        assert server.post("/v1/chat/completions", body)[1]["usage"]["prompt_tokens"] == reported["count"]
    short = post("/tokenize", {"model": MODEL, "messages": CHAT, "add_generation_prompt": False})
    assert short["count"] < post("/tokenize", {"model": MODEL, "messages": CHAT})["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"model": "nobody", "prompt": "Hi"}, 404, "model"),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "Hi", "messages": CHAT}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ],
)
def test_invalid_input(server, path, body, status, param):
    got, response = server.post(path, body, "openai")
    assert (got, response["error"]["param"]) == (status, param)


def test_unknown_token_ids_are_rejected(server):
    assert server.post("/detokenize", {"tokens": [2**31 - 1]}, "openai") == (200, {"prompt": ""})


def test_version_and_ping(server):
    assert json.loads(server.get("/version", "openai")[1]) == {"version": neso.__version__}
    assert server.get("/ping", "openai")[0] == 200
    assert server.post("/ping", {}, "openai")[0] == 200


def test_model_card(server):
    (card,) = json.loads(server.get("/v1/models", "openai")[1])["data"]
    assert (card["id"], card["root"], card["parent"]) == (MODEL, MODEL, None)
    assert card["max_model_len"] == 2048
    assert card["permission"][0]["allow_sampling"] is True
    assert json.loads(server.get(f"/v1/models/{MODEL}", "openai")[1]) == card
