"""Models with text as tensors, with the `openai` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from eventually import wait_until
from server_process import ServerProcess

REPOSITORY = Path(__file__).parent / "repositories" / "text_models"
WORDS = [f" w{i}" for i in range(8)]
BY_TENSORS = ["vllm_words", "trtllm_words", "words_ensemble", "scripted_bls"]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--model-repository", REPOSITORY, timeout=90) as process:
        assert process.ports, process.output
        yield process


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0)


def complete(client: openai.OpenAI, model: str, prompt: str = "a b c", **fields: Any) -> Any:
    return client.completions.create(model=model, prompt=prompt, **fields)


def shown(client: openai.OpenAI, model: str, **fields: Any) -> dict[str, Any]:
    """Return the input tensors that the model received."""
    return json.loads(complete(client, model, "show", **fields).choices[0].text)


def test_text_models_are_listed(client: openai.OpenAI) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert cards.keys() == {"echo", *BY_TENSORS, "pirate", "poet"}
    assert (cards["pirate"].parent, cards["poet"].parent) == ("vllm_words", "trtllm_words")


@pytest.mark.parametrize(
    ("model", "why"), [("needs_more", "query_embedding"), ("preprocessing", "text_input")]
)
def test_other_models_return_a_reason(client: openai.OpenAI, model: str, why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as refusal:
        complete(client, model)
    assert refusal.value.param == "model"
    with pytest.raises(openai.BadRequestError, match=why):
        client.models.retrieve(model)


def test_unknown_usage_is_omitted(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no tokens") as refusal:
        complete(client, "trtllm_words", extra_body={"return_token_ids": True})
    assert refusal.value.param == "return_token_ids"


@pytest.mark.parametrize("model", BY_TENSORS)
def test_unary_and_streamed_responses_are_equal(client: openai.OpenAI, model: str) -> None:
    whole = complete(client, model, max_tokens=99)
    assert whole.choices[0].text == "".join(WORDS)
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(complete(client, model, max_tokens=99, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].text for chunk in chunks[:-1]]
    assert [text for text in texts if text] == WORDS
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens == 3
    assert whole.usage.completion_tokens >= 8


@pytest.mark.parametrize("model", ["vllm_words", "trtllm_words", "words_ensemble"])
def test_max_tokens_limits_the_output(client: openai.OpenAI, model: str) -> None:
    (choice,) = complete(client, model, max_tokens=3).choices
    assert (choice.text, choice.finish_reason) == (" w0 w1 w2", "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", BY_TENSORS)
def test_stop_strings_are_not_output(client: openai.OpenAI, model: str, stream: bool) -> None:
    response = complete(client, model, max_tokens=99, stop=["w3", "w5"], stream=stream)
    choices = [chunk.choices[0] for chunk in response] if stream else response.choices
    assert "".join(choice.text for choice in choices) == " w0 w1 w2 "
    assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("model", BY_TENSORS)
def test_several_choices(client: openai.OpenAI, model: str) -> None:
    response = complete(client, model, n=3, max_tokens=99)
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert {choice.text for choice in response.choices} == {"".join(WORDS)}
    assert response.usage.prompt_tokens == 3
    assert response.usage.completion_tokens >= 24


def test_vllm_convention_inputs(client: openai.OpenAI) -> None:
    reported = shown(client, "vllm_words", temperature=0.5, seed=7, stop="§", extra_body={"top_k": 4})
    assert reported["sampling"] == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 4,
        "seed": 7,
        "stop": ["§"],
        "max_tokens": 16,
    }
    assert reported["exclude_input_in_output"] == [True]
    assert reported["stream"] == [False]


@pytest.mark.parametrize("model", ["trtllm_words", "words_ensemble"])
def test_tensorrtllm_convention_inputs(client: openai.OpenAI, model: str) -> None:
    reported = shown(
        client,
        model,
        temperature=0.5,
        seed=7,
        stop=["§", "¶"],
        presence_penalty=1.5,
        extra_body={"top_k": 4, "guided_choice": ["yes", "no."]},
    )
    assert reported == {
        "text_input": [["show"]],
        "max_tokens": [[16]],
        "temperature": [[0.5]],
        "top_p": [[1.0]],
        "top_k": [[4]],
        "seed": [[7]],
        "presence_penalty": [[1.5]],
        "stop_words": [["§", "¶"]],
        "stream": [[False]],
        "exclude_input_in_output": [[True]],
        "return_num_input_tokens": [[True]],
        "return_num_output_tokens": [[True]],
        "guided_decoding_guide_type": [["regex"]],
        "guided_decoding_guide": [["(yes)|(no\\.)"]],
    }


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        ("echo", {"temperature": 0.5}, "temperature"),
        ("trtllm_words", {"logprobs": 1}, "logprobs"),
        ("trtllm_words", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("trtllm_words", {"extra_body": {"min_p": 0.5}}, "min_p"),
        ("trtllm_words", {"extra_body": {"cache_salt": "mine"}}, "cache_salt"),
        ("scripted_bls", {"frequency_penalty": 1}, "frequency_penalty"),
    ],
)
def test_parameters_without_an_input_are_rejected(
    client: openai.OpenAI, model: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"no input for it|would need the inputs") as refusal:
        complete(client, model, **fields)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("model", "reported"),
    [
        ("vllm_words:pirate", {"sampling.lora_name": "pirate"}),
        ("pirate", {"sampling.lora_name": "pirate"}),
        ("trtllm_words:poet", {"lora_task_id": [[12]]}),
        ("poet", {"lora_task_id": [[12]]}),
        ("trtllm_words:7", {"lora_task_id": [[7]]}),
        ("words_ensemble:7", {"lora_task_id": [[7]]}),
    ],
)
def test_adapters(client: openai.OpenAI, model: str, reported: dict[str, Any]) -> None:
    tensors = shown(client, model)
    tensors |= {f"sampling.{name}": value for name, value in tensors.get("sampling", {}).items()}
    assert {name: tensors[name] for name in reported} == reported


@pytest.mark.parametrize("model", ["vllm_words:nobody", "vllm_words:7", "echo:7", "trtllm_words:", ":7"])
def test_unknown_adapters(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        complete(client, model)


def test_log_probabilities(client: openai.OpenAI) -> None:
    for stream in (False, True):
        response = complete(client, "vllm_words", max_tokens=2, logprobs=1, stream=stream)
        choices = [chunk.choices[0] for chunk in response] if stream else response.choices
        parts = [choice.logprobs for choice in choices if choice.logprobs and choice.logprobs.tokens]
        assert [token for part in parts for token in part.tokens] == [" w0", " w1"]
        assert [top for part in parts for top in part.top_logprobs] == [
            {" o0": -1.0, " w0": -1.5},
            {" o0": -1.0, " w1": -1.5},
        ]


def test_model_with_text_input_only(client: openai.OpenAI) -> None:
    response = complete(client, "echo", "as it is")
    assert response.choices[0].text == "as it is"
    with pytest.raises(openai.BadRequestError, match="no tokenizer is known"):
        complete(client, "echo", [1, 2, 3])


def test_token_prompts_become_text(client: openai.OpenAI) -> None:
    response = complete(client, "scripted_bls", [300, 301, 302], max_tokens=3)
    assert response.usage.prompt_tokens == 3


def test_chats(client: openai.OpenAI) -> None:
    """The template is that of the model's tokenizer or of a model that it calls; without one chats are rejected."""
    messages = [{"role": "user", "content": "hi"}]
    for model in ("vllm_words", "scripted_bls"):
        response = client.chat.completions.create(model=model, messages=messages)
        assert response.choices[0].message.content == "".join(WORDS)
        chunks = client.chat.completions.create(model=model, messages=messages, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "".join(WORDS)
    for model in ("echo", "trtllm_words"):
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model=model, messages=messages)


def test_responses(client: openai.OpenAI) -> None:
    for model in ("vllm_words", "scripted_bls"):
        for truncation in ("disabled", "auto"):
            made = client.responses.create(model=model, input="hi", truncation=truncation)
            assert made.output_text == "".join(WORDS)
        with client.responses.stream(model=model, input="hi", previous_response_id=made.id) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "".join(WORDS)
    for model in ("echo", "trtllm_words"):
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.responses.create(model=model, input="hi")


async def test_disconnect_cancels_the_request(server: ServerProcess) -> None:
    client = openai.AsyncOpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0)
    name = 'nv_inference_request_failure{model="trtllm_words",reason="CANCELED",version="1"}'
    before = server.metrics().get(name, 0)
    stream = await client.completions.create(
        model="trtllm_words", prompt="slowly please", stream=True, max_tokens=99
    )
    await anext(aiter(stream))
    await stream.close()
    await asyncio.to_thread(wait_until, lambda: server.metrics().get(name, 0) > before)


async def test_many_concurrent_requests(server: ServerProcess) -> None:
    client = openai.AsyncOpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0)
    answers = await asyncio.gather(
        *(client.completions.create(model=BY_TENSORS[i % 4], prompt="a", max_tokens=99) for i in range(40))
    )
    assert {response.choices[0].text for response in answers} == {"".join(WORDS)}


def test_options_for_models_without_a_tokenizer(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    with ServerProcess(
        "--model-repository",
        REPOSITORY,
        "--tokenizer=neso-pilot",
        "--chat-template",
        template,
        "--lora-separator=--",
        timeout=90,
    ) as server:
        assert server.ports, server.output
        client = openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0)
        response = client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "hi"}])
        assert response.choices[0].message.content == "user: hi\nassistant:"
        assert response.usage.prompt_tokens == response.usage.completion_tokens > 0
        assert shown(client, "trtllm_words--7")["lora_task_id"] == [[7]]
        # A model without max_tokens is truncated there.
        (choice,) = complete(client, "echo", "one two three four", max_tokens=2).choices
        assert choice.finish_reason == "length"
        assert "one two three four".startswith(choice.text)
        assert choice.text != "one two three four"


@pytest.mark.parametrize("option", ["--tokenizer=/nowhere", "--chat-template=/nowhere.jinja"])
def test_invalid_options_fail_the_start(option: str) -> None:
    with ServerProcess("--model-repository", REPOSITORY, option) as server:
        assert server.process.wait(60) == 1
        assert "/nowhere" in server.output
