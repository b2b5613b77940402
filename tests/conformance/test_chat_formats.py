"""Chat formats with special tokens, on the bundled model with a renamed token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import openai
import pytest
from server_process import ServerProcess

from neso.models import SHIPPED_MODELS

PILOT = SHIPPED_MODELS["neso-pilot"]
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
TRIP = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "plan_trip", "parameters": TRIP}}]
FORM = {"type": "json_schema", "json_schema": {"name": "trip", "schema": TRIP, "strict": True}}
RENAMED = 3  # its id
END = "{{- '<|im_start|>assistant\\n' }}"


def add_model(repository: Path, name: str, token: str, changed: tuple[str, str], **parameters: str) -> None:
    """Add the bundled model with its padding token renamed to `token`, and a modified chat template."""
    version = repository / name / "1"
    shutil.copytree(PILOT, version)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        path = version / file
        path.write_text(path.read_text().replace("<|pad|>", token))
    config = json.loads((version / "tokenizer_config.json").read_text())
    assert changed[0] in config["chat_template"]
    config["chat_template"] = config["chat_template"].replace(*changed)
    (version / "tokenizer_config.json").write_text(json.dumps(config))
    lines = [f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in parameters.items()]
    (repository / name / "config.pbtxt").write_text("\n".join(['backend: "llm"', *lines]))


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    # The formats are detected from the templates, except for the third model, which configures it.
    add_model(repository, "mistral", "[TOOL_CALLS]", ("<tool_call>", "[TOOL_CALLS]"))
    add_model(
        repository,
        "thinker",
        "[/THINK]",
        (END, "{{- '<|im_start|>assistant\\n[THINK]' }}{# [/THINK] #}"),
    )
    add_model(repository, "named", "[TOOL_CALLS]", (END, END), tool_call_parser="mistral_v11")
    with ServerProcess(f"--model-repository={repository}") as server:
        assert server.ports, server.output
        with openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0) as client:
            yield client


@pytest.mark.parametrize("model", ["mistral", "named"])
@pytest.mark.parametrize("stream", [False, True])
def test_calls(api, model, stream):
    fields = {"model": model, "messages": QUESTION, "tools": TOOLS, "tool_choice": "required"}
    fields |= {"parallel_tool_calls": False, "logprobs": True, "max_completion_tokens": 100}
    if stream:
        with api.chat.completions.stream(**fields) as chunks:
            chunks.until_done()
            (choice,) = chunks.get_final_completion().choices
    else:
        (choice,) = api.chat.completions.create(**fields).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "plan_trip" and not choice.message.content
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    written = [entry.token for entry in choice.logprobs.content]
    assert written[0] == "[TOOL_CALLS]"
    assert "".join(written).startswith(
        '[TOOL_CALLS][{"name": "plan_trip", ' if model == "mistral" else "[TOOL_CALLS]plan_trip[ARGS]{"
    )


def test_special_tokens_stay_hidden(api):
    """Special tokens outside the format, and those of the format without a tool call."""
    other = {"logit_bias": {"1": 100}, "max_completion_tokens": 5, "temperature": 0}
    for fields in ({}, {"tools": TOOLS}):
        for model in ("mistral", "thinker"):
            (choice,) = api.chat.completions.create(model=model, messages=QUESTION, **fields, **other).choices
            assert not choice.message.content and choice.finish_reason == "length"
    likely = {**other, "logit_bias": {str(RENAMED): 100}}
    (choice,) = api.chat.completions.create(model="mistral", messages=QUESTION, **likely).choices
    assert choice.message.content == ""
    (choice,) = api.chat.completions.create(
        model="mistral", messages=QUESTION, extra_body={"skip_special_tokens": False}, **likely
    ).choices
    assert choice.message.content == "[TOOL_CALLS]" * 5


@pytest.mark.parametrize("fields", [{"response_format": FORM}, {"tools": TOOLS, "tool_choice": "required"}])
def test_reasoning_and_content(api, fields):
    """The prompt opens the reasoning. Its end mark gets a logit bias, since the model would not generate it."""
    found = 0
    for seed in range(4):
        (choice,) = api.chat.completions.create(
            model="thinker",
            messages=QUESTION,
            seed=seed,
            logit_bias={str(RENAMED): 18},
            parallel_tool_calls=False if "tools" in fields else openai.omit,
            max_completion_tokens=250,
            **fields,
        ).choices
        message = choice.message
        if choice.finish_reason == "length":
            assert message.content is None and message.reasoning_content
            continue
        found += 1
        text = message.tool_calls[0].function.arguments if "tools" in fields else message.content
        assert json.loads(text)["city"] in ("Paris", "Rome")
        assert "THINK" not in (message.reasoning_content if hasattr(message, "reasoning_content") else "")
    assert found


def test_reasoning_in_a_stream(api):
    reasoning, content = "", ""
    for chunk in api.chat.completions.create(
        model="thinker", messages=QUESTION, temperature=0, max_completion_tokens=10, stream=True
    ):
        delta = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
    assert reasoning and not content
    reply = api.chat.completions.create(
        model="thinker", messages=QUESTION, temperature=0, max_completion_tokens=10
    )
    assert reply.choices[0].message.reasoning_content == reasoning
    assert reply.usage.completion_tokens_details.reasoning_tokens == reply.usage.completion_tokens
