"""TensorRT-LLM's layout with the OpenAI API: the ensemble, the BLS model, and the engine model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from eventually import wait_until
from layout_repository import ANSWER, PROMPT, init
from server_process import ServerProcess

CHAINS = ("ensemble", "tensorrt_llm_bls")
MODELS = (*CHAINS, "tensorrt_llm")
QUESTION = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = init(tmp_path_factory.mktemp("trtllm"))
    with ServerProcess(f"--model-repository={repository}", timeout=90) as process:
        assert process.ports, process.output
        yield process


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0)


def complete(client: openai.OpenAI, model: str, **fields: Any) -> Any:
    fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    return client.completions.create(model=model, **fields)


def test_text_models_are_listed(client: openai.OpenAI) -> None:
    cards = {card.id: card.max_model_len for card in client.models.list()}
    assert cards == dict.fromkeys(MODELS, 2048)


@pytest.mark.parametrize("model", MODELS)
def test_completions(client: openai.OpenAI, model: str) -> None:
    response = complete(client, model)
    assert response.choices[0].text == ANSWER
    assert response.choices[0].finish_reason == "length"
    assert response.usage.completion_tokens == 12
    chunks = list(complete(client, model, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].text for chunk in chunks[:-1]]
    assert "".join(pieces) == ANSWER
    assert len([piece for piece in pieces if piece]) > 8
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == response.usage.prompt_tokens > 0


def test_chats_are_equal_on_every_model(client: openai.OpenAI) -> None:
    answers = []
    for model in MODELS:
        response = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
        assert response.choices[0].finish_reason == "stop"
        chunks = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == response.choices[0].message.content
        answers.append(text)
    assert len(set(answers)) == 1
    assert answers[0]


@pytest.mark.parametrize("model", CHAINS)
def test_choices_differ_by_their_seeds(client: openai.OpenAI, model: str) -> None:
    def texts() -> list[str]:
        response = complete(client, model, n=3, seed=5, temperature=1.5, max_tokens=20)
        return [choice.text for choice in response.choices]

    assert len(set(texts())) == 3
    assert texts() == texts()


@pytest.mark.parametrize("model", CHAINS)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: openai.OpenAI, model: str, stream: bool) -> None:
    stop = ANSWER[len(ANSWER) // 2 :][:4]
    response = complete(client, model, stop=stop, stream=stream)
    choices = [chunk.choices[0] for chunk in response] if stream else response.choices
    assert "".join(choice.text for choice in choices) == ANSWER[: ANSWER.index(stop)]
    assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("model", CHAINS)
def test_guided_decoding(client: openai.OpenAI, model: str) -> None:
    response = complete(client, model, extra_body={"guided_choice": ["yes", "no"]})
    assert response.choices[0].text in ("yes", "no")


@pytest.mark.parametrize("model", CHAINS)
def test_log_probabilities(client: openai.OpenAI, model: str) -> None:
    """They equal those of the engine; their tokens are found by aligning the text."""
    expected = complete(client, "tensorrt_llm", logprobs=0).choices[0].logprobs
    for stream in (False, True):
        response = complete(client, model, logprobs=0, stream=stream)
        choices = [chunk.choices[0] for chunk in response] if stream else response.choices
        parts = [choice.logprobs for choice in choices if choice.logprobs and choice.logprobs.tokens]
        assert [token for part in parts for token in part.tokens] == expected.tokens
        assert [offset for part in parts for offset in part.text_offset] == expected.text_offset
        numbers = [number for part in parts for number in part.token_logprobs]
        assert numbers == pytest.approx(expected.token_logprobs, abs=1e-3)
    chat = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, logprobs=True)
    content = chat.choices[0].logprobs.content
    assert "".join(token.token for token in content) == chat.choices[0].message.content
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model=model, messages=QUESTION, logprobs=True, top_logprobs=2)
    assert refusal.value.param == "top_logprobs"


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.mark.parametrize("model", CHAINS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tool_calls(client: openai.OpenAI, model: str, choice: Any) -> None:
    requested: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": choice,
        "temperature": 0,
    }
    (whole,) = client.chat.completions.create(**requested).choices
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**requested, stream=True)]
    calls = [delta.tool_calls[0].function for delta in deltas if delta.tool_calls]
    assert calls[0].name == "get_weather"
    assert "".join(call.arguments for call in calls) == '{"city": "Paris"}'


@pytest.mark.parametrize("model", CHAINS)
def test_responses(client: openai.OpenAI, model: str) -> None:
    whole = client.responses.create(model=model, input="Who are you?", temperature=0)
    assert whole.output_text
    events = list(client.responses.create(model=model, input="Who are you?", temperature=0, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert len(deltas) > 5


@pytest.mark.parametrize("model", MODELS)
def test_prompts_over_the_context_length(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(client, model, prompt="x " * 5000)
    assert (refusal.value.param, refusal.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x " * 5000}])
    assert (refusal.value.param, refusal.value.code) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize("model", CHAINS)
async def test_disconnect_frees_the_engine(server: ServerProcess, model: str) -> None:
    client = openai.AsyncOpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0)
    stream = await client.completions.create(
        model=model, prompt=PROMPT, max_tokens=1900, stream=True, extra_body={"seed": 1}
    )
    await anext(aiter(stream))
    await stream.close()
    running = 'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"}'
    await asyncio.to_thread(wait_until, lambda: server.metrics()[running] == 0)


async def test_many_concurrent_requests(server: ServerProcess) -> None:
    client = openai.AsyncOpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0)
    answers = await asyncio.gather(
        *(
            client.completions.create(model=MODELS[i % 3], prompt=PROMPT, max_tokens=12, temperature=0)
            for i in range(12)
        )
    )
    assert {response.choices[0].text for response in answers} == {ANSWER}


@pytest.mark.parametrize("option", ["--no-decoupled", "--accumulate-tokens"])
def test_unsupported_parameters(tmp_path: Path, option: str) -> None:
    """Models with a single response, and BLS models whose responses contain the whole text each time."""
    with ServerProcess(f"--model-repository={init(tmp_path, option)}", timeout=90) as server:
        assert server.ports, server.output
        client = openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0)
        for model in CHAINS:
            assert complete(client, model).choices[0].text == ANSWER
            chunks = complete(client, model, stream=True)
            assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
