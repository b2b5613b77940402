"""Clients of the language models of the soak test, which can lose their engine at any time.

Requests to `pilot` are read to their end, so the server must count exactly the successes that the clients have seen.
Requests to `cancelled` are abandoned.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from tritonclient.grpc import service_pb2

from soaking.loads import TIMEOUT, Clients, Load, expect

PROMPTS = tuple(f"What is paged attention? ({number})" for number in range(8))
MAX_TOKENS = 24
RESTARTING = "restarting"
"""Outcome of a request that failed because its engine has died. It can be sent again."""
GREEDY = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0}


class EngineGone(Exception):
    """The engine of the request has ended."""


def check_error(message: str) -> None:
    """Raise `EngineGone` for the error of a dead engine, `UnexpectedResult` for any other."""
    expect("is being restarted: retry" in message, f"unexpected error: {message}")
    raise EngineGone


async def expect_texts(clients: Clients) -> None:
    """Ask each prompt once, while nothing else runs: the greedy text is the same whatever runs beside it."""
    for prompt in PROMPTS:
        clients.texts[prompt] = await _generate(clients, "pilot", prompt)
        clients.answered["pilot"] += 1
        clients.chats[prompt] = (await _chat(clients, prompt))["choices"][0]["message"]["content"]
        clients.answered["pilot"] += 1


def _check(clients: Clients, expected: dict[str, str], prompt: str, text: str, api: str) -> str:
    expect(text == expected[prompt], f"{api}: {text!r} instead of {expected[prompt]!r}")
    clients.answered["pilot"] += 1
    return "ok"


def retryable(load: Load) -> Load:
    """Turn `EngineGone` of a load into the outcome `RESTARTING`."""

    async def attempt(clients: Clients) -> str:
        try:
            return await load(clients)
        except EngineGone:
            await asyncio.sleep(0.1)
            return RESTARTING

    attempt.__name__ = load.__name__.lstrip("_")
    return attempt


async def _generate(clients: Clients, model: str, prompt: str) -> str:
    body = {"text_input": prompt, **GREEDY}
    status, _, data = await clients.post(f"/v2/models/{model}/generate", body)
    answer = json.loads(data)
    if status != 200:
        expect(status == 503, f"generate: {status} {data[:200]!r}")
        check_error(answer["error"])
    return str(answer["text_output"])


async def _chat(clients: Clients, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "pilot", "messages": [{"role": "user", "content": prompt}], **GREEDY, **fields}
    return await _openai(clients, "/v1/chat/completions", body)


async def _openai(clients: Clients, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with clients.http.post(clients.server.url(path, "openai"), json=body) as response:
        answer: dict[str, Any] = await response.json()
        if response.status != 200:
            expect(response.status == 503, f"{path}: {response.status} {answer}")
            check_error(answer["error"]["message"])
        return answer


async def _events(clients: Clients, url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream. Raises `EngineGone`."""
    async with clients.http.post(url, json=body) as response:
        if response.status != 200:
            text = await response.text()
            expect(response.status == 503, f"{url}: {response.status} {text}")
            error = json.loads(text.removeprefix("data: "))["error"]  # generate_stream sends an event
            check_error(error if isinstance(error, str) else error["message"])
        ended = False
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            expect(not ended, f"{url}: an event after the end: {line[:200]!r}")
            if line.strip() == b"data: [DONE]":
                ended = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                error = event["error"]
                check_error(error if isinstance(error, str) else error["message"])
            yield event


def _generate_events(clients: Clients, model: str, max_tokens: int) -> tuple[str, AsyncIterator[Any]]:
    prompt = clients.random.choice(PROMPTS)
    body = {"text_input": prompt, **GREEDY, "max_tokens": max_tokens, "stream": True}
    return prompt, _events(clients, clients.server.url(f"/v2/models/{model}/generate_stream"), body)


async def _generate_once(clients: Clients) -> str:
    prompt = clients.random.choice(PROMPTS)
    text = await _generate(clients, "pilot", prompt)
    return _check(clients, clients.texts, prompt, text, "generate")


async def _generate_stream(clients: Clients) -> str:
    prompt, events = _generate_events(clients, "pilot", MAX_TOKENS)
    text = "".join([event["text_output"] async for event in events])
    return _check(clients, clients.texts, prompt, text, "generate_stream")


async def _grpc_generate(clients: Clients) -> str:
    """Generate over a gRPC stream: each token once, and one final response."""
    prompt = clients.random.choice(PROMPTS)
    request = service_pb2.ModelInferRequest(model_name="pilot", id="g")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
        prompt.encode()
    )
    request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.parameters["max_tokens"].int64_param = MAX_TOKENS
    request.parameters["ignore_eos"].bool_param = True
    request.parameters["temperature"].double_param = 0.0
    text = ""
    async for answer in clients.grpc.ModelStreamInfer(iter([request]), timeout=TIMEOUT):
        if answer.error_message:
            check_error(answer.error_message)
        outputs = {output.name: i for i, output in enumerate(answer.infer_response.outputs)}
        raw = answer.infer_response.raw_output_contents
        text += raw[outputs["text_output"]][4:].decode() if raw else ""
    return _check(clients, clients.texts, prompt, text, "ModelStreamInfer")


async def _openai_completion(clients: Clients) -> str:
    prompt = clients.random.choice(PROMPTS)
    answer = await _openai(clients, "/v1/completions", {"model": "pilot", "prompt": prompt, **GREEDY})
    expect(answer["usage"]["completion_tokens"] == MAX_TOKENS, f"completion: {answer['usage']}")
    return _check(clients, clients.texts, prompt, answer["choices"][0]["text"], "/v1/completions")


async def _openai_chat(clients: Clients) -> str:
    prompt = clients.random.choice(PROMPTS)
    answer = await _chat(clients, prompt)
    text = answer["choices"][0]["message"]["content"]
    return _check(clients, clients.chats, prompt, text, "/v1/chat/completions")


async def _openai_chat_stream(clients: Clients) -> str:
    prompt = clients.random.choice(PROMPTS)
    body = {"model": "pilot", "messages": [{"role": "user", "content": prompt}], **GREEDY, "stream": True}
    text, reasons = "", []
    async for event in _events(clients, clients.server.url("/v1/chat/completions", "openai"), body):
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    expect(reasons == ["length"], f"finish reasons of a stream: {reasons}")
    return _check(clients, clients.chats, prompt, text, "chat stream")


async def _cancel_generate(clients: Clients) -> str:
    """Disconnect after the first tokens."""
    _, events = _generate_events(clients, "cancelled", 500)
    await anext(events)
    await events.aclose()  # type: ignore[attr-defined]
    return "ok"


async def _cancel_completion(clients: Clients) -> str:
    """Disconnect from an OpenAI stream after some chunks."""
    body = {"model": "cancelled", "prompt": "Hi", **GREEDY, "max_tokens": 500, "stream": True}
    events = _events(clients, clients.server.url("/v1/completions", "openai"), body)
    for _ in range(clients.random.randrange(1, 5)):
        await anext(events)
    await events.aclose()  # type: ignore[attr-defined]
    return "ok"


async def _reload_engine(clients: Clients) -> str:
    """Load a language model with its engine process, use it, and unload it."""
    status, _, answer = await clients.post("/v2/repository/models/guest/load", {})
    expect(status == 200, f"load: {status} {answer[:200]!r}")
    text = await _generate(clients, "guest", PROMPTS[0])
    expect(text == clients.texts[PROMPTS[0]], f"guest: {text!r}")
    status, _, answer = await clients.post("/v2/repository/models/guest/unload", {})
    expect(status == 200, f"unload: {status} {answer[:200]!r}")
    await asyncio.sleep(5)
    return "ok"


GENERATION_LOADS: dict[Load, int] = {
    retryable(load): count
    for load, count in (
        (_generate_once, 1),
        (_generate_stream, 2),
        (_grpc_generate, 2),
        (_openai_completion, 1),
        (_openai_chat, 1),
        (_openai_chat_stream, 1),
        (_cancel_generate, 1),
        (_cancel_completion, 1),
        (_reload_engine, 1),
    )
}
"""Number of workers of each load."""
