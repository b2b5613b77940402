"""The `openai` package against the OpenAI API, over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from eventually import until
from scripted_model import ScriptedModel
from starlette.applications import Starlette

from neso.frontends.transport.http1.asgi import AsgiServer
from neso.frontends.transport.http1.server import HttpServerOptions

HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
async def url(app: Starlette) -> AsyncIterator[str]:
    server = AsgiServer(app, HttpServerOptions(port=0))
    await server.start()
    yield f"http://{server.address}/v1"
    await server.stop(grace=1.0)


@pytest.fixture
async def openai_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def test_models(openai_client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in openai_client.models.list()] == ["scripted"]
    assert (await openai_client.models.retrieve("scripted")).owned_by == "neso"


async def test_completion(openai_client: openai.AsyncOpenAI) -> None:
    response = await openai_client.completions.create(
        model="scripted", prompt=["a", "b"], n=2, logprobs=1, echo=True, extra_body={"top_k": 3}
    )
    assert [choice.text for choice in response.choices] == ["ahello there"] * 2 + ["bhello there"] * 2
    assert response.usage is not None
    assert response.usage.prompt_tokens_details is not None
    assert response.usage.prompt_tokens_details.cached_tokens == 4
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["<s>", "a", "hello", " there", "</s>"]


async def test_streamed_completion(openai_client: openai.AsyncOpenAI) -> None:
    stream = await openai_client.completions.create(
        model="scripted", prompt="a", stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "hello there"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


async def test_chat(openai_client: openai.AsyncOpenAI) -> None:
    response = await openai_client.chat.completions.create(
        model="scripted", messages=HI, logprobs=True, top_logprobs=1
    )
    (choice,) = response.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "hello there")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert choice.logprobs.content[0].bytes == list(b"hello")


async def test_streamed_chat_with_the_client_accumulator(
    openai_client: openai.AsyncOpenAI, script: ScriptedModel
) -> None:
    """The client's accumulator rejects inconsistent chunks."""
    script.reply = lambda request, choice: "Let me see.\n" + CALL
    async with openai_client.chat.completions.stream(
        model="scripted", messages=HI, tools=TOOLS, n=2, stream_options={"include_usage": True}
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert len(final.choices) == 2
    for choice in final.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        assert call.function.arguments == '{"city": "Paris"}'


async def test_tool_result_message(openai_client: openai.AsyncOpenAI, script: ScriptedModel) -> None:
    script.reply = lambda request, choice: CALL
    first = await openai_client.chat.completions.create(model="scripted", messages=HI, tools=TOOLS)
    message = first.choices[0].message
    assert message.tool_calls is not None
    response: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    script.reply = lambda request, choice: "It is sunny."
    messages: Any = [*HI, message, response]
    second = await openai_client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "It is sunny."
    assert '"tool_call_id"' in str(script.requests[-1].prompt)


async def test_errors_map_to_client_exceptions(
    openai_client: openai.AsyncOpenAI, script: ScriptedModel
) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await openai_client.chat.completions.create(model="nope", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await openai_client.chat.completions.create(model="scripted", messages=HI, temperature=-1)
    assert bad.value.param == "temperature"
    script.error, script.fail_after = RuntimeError("broken"), 1
    stream = await openai_client.chat.completions.create(model="scripted", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="The server had an error"):
        async for _ in stream:
            pass


async def test_disconnect_aborts_generation(openai_client: openai.AsyncOpenAI, script: ScriptedModel) -> None:
    script.hold = True
    stream = await openai_client.chat.completions.create(model="scripted", messages=HI, stream=True)
    async for _ in stream:
        break
    await stream.close()
    for timeout in (0.3, 1, 10):  # a request that is cancelled too early may not reach a slow server
        with pytest.raises(openai.APITimeoutError):
            await openai_client.chat.completions.create(model="scripted", messages=HI, timeout=timeout)
        if len(script.requests) > 1:
            break
    await until(lambda: len(script.aborted) == len(script.requests))
    assert sorted(script.aborted) == sorted(request.request_id for request in script.requests)
    assert len(script.requests) > 1


async def test_concurrent_requests(openai_client: openai.AsyncOpenAI, script: ScriptedModel) -> None:
    script.reply = lambda request, choice: f"<{str(request.prompt)[-8:]}>"

    async def one(number: int) -> str:
        stream = await openai_client.completions.create(
            model="scripted", prompt=f"{number:08}", stream=True, max_tokens=50
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    assert await asyncio.gather(*map(one, range(30))) == [f"<{number:08}>" for number in range(30)]


async def test_synchronous_client(url: str) -> None:
    def exchange() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            whole = client.chat.completions.create(model="scripted", messages=HI)
            stream = client.completions.create(model="scripted", prompt="a", stream=True)
            return whole.choices[0].message.content, "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(exchange) == ("hello there", "hello there")
