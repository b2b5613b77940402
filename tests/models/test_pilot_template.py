"""Chat template and end tokens of the bundled model, with jinja2 and tokenizers only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from neso.models import SHIPPED_MODELS

PILOT = SHIPPED_MODELS["neso-pilot"]
TEMPLATE = Path(__file__).parents[2] / "models" / "pilot" / "chat_template.jinja"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def render():
    """Render the template in a plain sandbox, without the extensions of transformers."""
    return ImmutableSandboxedEnvironment().from_string(TEMPLATE.read_text(encoding="utf-8")).render


def test_end_tokens_match_the_tokenizer():
    tokenizer = Tokenizer.from_file(str(PILOT / "tokenizer.json"))
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((PILOT / name).read_text(encoding="utf-8"))["eos_token_id"] == ends


def test_renders_a_chat(render):
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Thanks"},
    ]
    chat = (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
    )
    assert render(messages=messages) == chat
    assert render(messages=messages, add_generation_prompt=True) == f"{chat}<|im_start|>assistant\n"
    system = {"role": "system", "content": "Be brief."}
    assert render(messages=[system, *messages]) == f"<|im_start|>system\nBe brief.<|im_end|>\n{chat}"


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}], ids=["string", "object"])
def test_renders_tools_calls_and_results(render, arguments):
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"temperature": 9}'},
    ]
    prompt = render(messages=messages, tools=[WEATHER], add_generation_prompt=True)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n")
    declaration = prompt.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(declaration) == WEATHER
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        "</tool_call><|im_end|>\n"
    ) in prompt
    assert '<tool_response>\n{"temperature": 9}\n</tool_response><|im_end|>\n' in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
