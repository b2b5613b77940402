"""Token details of chats, whole and streamed, on the bundled model."""

from __future__ import annotations

import json

import openai
import pytest

from neso.generation import SamplingParams

MODEL = "neso-pilot"
MESSAGES = [{"role": "user", "content": "What is TTFT?"}]
PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
def chat(server):
    def send(expected=200, **fields):
        body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 12, **fields}
        status, response = server.post(PATH, body, "openai")
        assert status == expected, response
        return response

    return send


@pytest.fixture
def stream(server):
    def send(**fields):
        body = {"temperature": 0, "max_tokens": 12, **fields}
        with openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0) as client:
            return list(
                client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, extra_body=body)
            )

    return send


def test_partial_characters_have_bytes(chat, llm):
    ids = llm.tokenizer.encode("☃日", add_special_tokens=False)
    content = chat(allowed_token_ids=ids, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    known = {tuple(llm.tokenizer.token_bytes(token)) for token in ids}
    assert any("\ufffd" in entry["token"] for entry in content)
    for entry in content:
        assert tuple(entry["bytes"]) in known
        assert all(top["bytes"] for top in entry["top_logprobs"])


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}, {"stop": ["token:"]}, {"n": 2, "seed": 1}])
def test_streamed_logprobs_equal_unary_logprobs(chat, stream, fields):
    fields = {"logprobs": True, "top_logprobs": 1, **fields}
    whole = {choice["index"]: choice["logprobs"]["content"] for choice in chat(**fields)["choices"]}
    reported = {index: [] for index in whole}
    for chunk in stream(**fields):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                reported[choice.index] += [entry.model_dump() for entry in choice.logprobs.content]
    assert json.loads(json.dumps(reported)) == json.loads(json.dumps(whole))


def test_token_ids(chat, stream, llm):
    expected = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12))
    ids = expected.outputs[0].token_ids
    whole = chat(return_token_ids=True, return_tokens_as_token_ids=True, logprobs=True)
    assert whole["prompt_token_ids"] == expected.prompt_token_ids
    assert whole["choices"][0]["token_ids"] == ids
    tokens = [entry["token"] for entry in whole["choices"][0]["logprobs"]["content"]]
    assert tokens == [f"token_id:{token}" for token in ids]
    chunks = stream(return_token_ids=True)
    assert chunks[0].prompt_token_ids == expected.prompt_token_ids
    assert not any("prompt_token_ids" in chunk.model_extra for chunk in chunks[1:])
    reported = [chunk.choices[0].model_extra.get("token_ids") or [] for chunk in chunks]
    assert [token for some in reported for token in some] == ids


def test_prompt_logprobs(chat, llm):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    expected = llm.chat(MESSAGES, params).prompt_logprobs
    first, *rest = chat(prompt_logprobs=1)["prompt_logprobs"]
    assert first is None
    assert [
        reported[str(entry.token_id)]["decoded_token"]
        for reported, entry in zip(rest, expected[1:], strict=True)
    ]
    assert chat(400, prompt_logprobs=1, stream=True)["error"]["param"] == "prompt_logprobs"


def test_truncated_prompts(chat):
    assert chat(truncate_prompt_tokens=5)["usage"]["prompt_tokens"] == 5
    long = [{"role": "user", "content": "word " * 5000}]
    assert chat(messages=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 2047


def test_beams_and_best_of(chat, llm):
    beams = chat(use_beam_search=True, n=3, temperature=1)["choices"]
    expected = llm.chat(MESSAGES, SamplingParams(beam_width=3, n=3, max_tokens=12)).outputs
    assert [choice["message"]["content"] for choice in beams] == [output.text for output in expected]
    assert chat(best_of=4, temperature=1, seed=1)["usage"]["completion_tokens"] > 12


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"web_search_options": {}}, None),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"max_new_tokens": 3}, "max_new_tokens"),
    ],
)
def test_rejected_parameters(chat, fields, param):
    if param is not None:
        assert chat(400, **fields)["error"]["param"] == param
    else:
        chat(**fields)
