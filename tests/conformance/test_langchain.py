"""LangChain's ChatOpenAI against a real server, with chat completions and the Responses API."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, Field

langchain_openai = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")
tools = pytest.importorskip("langchain_core.tools")


@pytest.fixture(scope="module", params=["chats", "responses"])
def chat(server, request):
    return langchain_openai.ChatOpenAI(
        model="neso-pilot",
        base_url=server.url("/v1", "openai"),
        api_key="none",
        temperature=0,
        max_completion_tokens=80,
        max_retries=0,
        use_responses_api=request.param == "responses",
    )


@tools.tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return '{"temperature": 21, "sky": "sunny"}'


class Trip(BaseModel):
    """A trip."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


def test_invoke_and_stream(chat):
    reply = chat.invoke("What is Neso?")
    assert reply.text
    assert reply.usage_metadata["output_tokens"] > 0
    chunks = list(chat.stream("What is Neso?"))
    assert "".join(chunk.text for chunk in chunks) == reply.text and len(chunks) > 3


def test_tool_loop(chat):
    bound = chat.bind_tools([get_weather])
    history = [messages.HumanMessage("What is the weather in Paris?")]
    call = bound.invoke(history)
    assert [(c["name"], c["args"]) for c in call.tool_calls] == [("get_weather", {"city": "Paris"})]
    history += [call, *(get_weather.invoke(c) for c in call.tool_calls)]
    assert bound.invoke(history).text == "It is 21 degrees and sunny in Paris."


def test_streamed_tool_calls(chat):
    gathered = None
    for chunk in chat.bind_tools([get_weather]).stream("What is the weather in Paris?"):
        gathered = chunk if gathered is None else gathered + chunk
    assert [(c["name"], c["args"]) for c in gathered.tool_calls] == [("get_weather", {"city": "Paris"})]


def test_required_tool(chat):
    call = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("Hello.")
    assert call.tool_calls[0]["name"] == "get_weather"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, method):
    assert isinstance(chat.with_structured_output(Trip, method=method).invoke("Plan a trip."), Trip)
