"""Chat templates, compared with `transformers`' apply_chat_template."""

from __future__ import annotations

import copy
import json
from typing import Any

import chat_templates
import pytest

from neso.engine.text import chat_template as module
from neso.engine.text.chat_template import ChatTemplate
from neso.generation import InvalidParameter

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": " Hi <b>&</b> 日本\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Hello."}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"città": {"type": "string"}}},
    },
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"città": "<Roma>", "n": 2}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": '{"t": 21}'}
THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning": "Let me see."}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "turns": [USER, ASSISTANT, USER],
    "system": [SYSTEM, USER, ASSISTANT, USER],
    "tool": [USER, CALL, RESULT, ASSISTANT],
    "tools twice": [USER, CALL, RESULT, RESULT, USER],
    "thought": [SYSTEM, USER, THOUGHT],
}
TEMPLATES = {
    name: getattr(chat_templates, name)
    for name in ("CHATML", "LLAMA3", "MISTRAL", "HERMES", "NAMESPACE", "PARTS")
}


def render(source: str, messages: Any, *, tools: Any = None, prompt: bool = True, **variables: Any) -> str:
    template = ChatTemplate(source, SPECIAL)
    return template.render(messages, tools=tools, add_generation_prompt=prompt, variables=variables)


def reference(source: str, messages: Any, tools: Any, prompt: bool, **variables: Any) -> str:
    """Return the text rendered by transformers; raises the exceptions of jinja2."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # As apply_chat_template does before this call.
    chat = [{k: v for k, v in message.items() if v is not None} for message in messages]
    (text,), _ = render_jinja_template(
        conversations=[chat],
        tools=tools,
        chat_template=source,
        add_generation_prompt=prompt,
        **SPECIAL,
        **variables,
    )
    return text


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(name: str, chat: str, tools: Any, prompt: bool) -> None:
    source, messages = TEMPLATES[name], CHATS[chat]
    before = copy.deepcopy(messages)
    try:
        expected = reference(source, messages, tools, prompt)
    except Exception:
        with pytest.raises(InvalidParameter, match="messages"):
            render(source, messages, tools=tools, prompt=prompt)
    else:
        assert render(source, messages, tools=tools, prompt=prompt) == expected
    assert messages == before


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("HERMES", {"enable_thinking": False}),
        ("LLAMA3", {"date_string": "1 Jan 2000", "bos_token": "<BOS>"}),
        ("NAMESPACE", {"documents": [{"title": "A", "text": "b"}]}),
    ],
)
def test_variables(name: str, variables: dict[str, Any]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = TEMPLATES[name]
    (expected,), _ = render_jinja_template(
        conversations=[[USER]], chat_template=source, add_generation_prompt=True, **{**SPECIAL, **variables}
    )
    assert render(source, [USER], **variables) == expected


@pytest.mark.parametrize("name", ["CHATML", "LLAMA3", "PARTS"])
@pytest.mark.parametrize("last", ["Sure, ", "Sure"])
def test_continue_final_message(name: str, last: str) -> None:
    messages = [USER, {"role": "assistant", "content": last}]
    expected = reference(TEMPLATES[name], messages, None, False, continue_final_message=True)
    assert render(TEMPLATES[name], messages, prompt=False, continue_final_message=True) == expected


def test_continue_final_message_errors() -> None:
    with pytest.raises(InvalidParameter, match="continue_final_message"):
        render(chat_templates.CHATML, [USER], prompt=True, continue_final_message=True)
    with pytest.raises(InvalidParameter, match="continue_final_message"):
        render(chat_templates.HERMES, [USER, CALL], prompt=False, continue_final_message=True)
    with pytest.raises(InvalidParameter, match="continue_final_message"):
        render("nothing", [USER], prompt=False, continue_final_message=True)


def test_json_arguments_are_decoded() -> None:
    as_text = copy.deepcopy(CALL)
    function = as_text["tool_calls"][0]["function"]  # type: ignore[index]
    function["arguments"] = json.dumps(function["arguments"])
    assert render(chat_templates.HERMES, [USER, as_text]) == render(chat_templates.HERMES, [USER, CALL])
    for given, shown in (("", "{}"), (None, "{}"), ("{broken", '"{broken"')):
        function["arguments"] = given
        assert f'"parameters": {shown}' in render(chat_templates.LLAMA3, [USER, as_text])


@pytest.mark.parametrize(
    ("written", "as_text"),
    [
        ("{{ f.arguments | tojson }}", False),
        ("{{ f | tojson }}", False),
        ("{{ f.arguments if f.arguments is string else f.arguments | tojson }}", False),
        ("{% for k, v in f.arguments.items() %}{{ k | tojson }}: {{ v }}{% endfor %}", False),
        ("{{ '```json' + f['arguments'] + '```' }}", True),
        ("{{ f.arguments }}", True),
    ],
)
def test_argument_types_follow_the_template(written: str, as_text: bool) -> None:
    """Objects if the template writes JSON, text if it concatenates text as DeepSeek's does."""
    source = (
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
        + written
        + "{% endfor %}{% endfor %}"
    )
    text = render(source, [USER, CALL, RESULT])
    assert '"città": "<Roma>"' in text or '"città": <Roma>' in text
    assert "'città'" not in text and '\\"' not in text
    template = ChatTemplate(source, SPECIAL)
    assert template._choose(None, None)._takes_arguments_as_text == as_text


def test_raise_exception_becomes_the_error() -> None:
    with pytest.raises(InvalidParameter) as error:
        render(chat_templates.MISTRAL, [USER, USER])
    assert error.value.field == "messages"
    assert error.value.message == "Conversation roles must alternate user/assistant/user/assistant/..."


PARTS_MESSAGE = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}


@pytest.mark.parametrize("name", ["CHATML", "LLAMA3", "MISTRAL", "HERMES", "NAMESPACE"])
def test_parts_are_joined_for_string_templates(name: str) -> None:
    flat = {"role": "user", "content": "a\nb"}
    assert render(TEMPLATES[name], [PARTS_MESSAGE]) == render(TEMPLATES[name], [flat])


def test_parts_are_kept_for_part_templates() -> None:
    assert render(chat_templates.PARTS, [PARTS_MESSAGE, USER]) == f"<user>[a][b]<user>{USER['content']}"
    assert render(chat_templates.ONLY_PARTS, [PARTS_MESSAGE, ASSISTANT]) == "user: abassistant: Hello."


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (["a"], "a"),
        ([{"type": "input_text", "text": "a"}], "a"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"text": "a"}], "a"),
        ([], ""),
    ],
)
def test_text_part_types(content: Any, shown: str) -> None:
    assert f"user\n{shown}<|im_end|>" in render(chat_templates.CHATML, [{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "empty"),
        ("hi", "list"),
        ({"role": "user"}, "list"),
        (["hi"], "message 0 must be an object"),
        ([USER, {"content": "x"}], "message 1 has no role"),
        ([{"role": "user", "content": 3}], "must be a string or a list"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url.*text only"),
        ([{"role": "user", "content": [{"type": "text"}]}], "no text"),
        ([{"role": "user", "content": [7]}], "not an object"),
        ([{"role": "user", "content": "x", "extra": object()}], "not a JSON value"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls"),
    ],
)
def test_invalid_messages(messages: Any, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason) as error:
        render(chat_templates.CHATML, messages)
    assert error.value.field == "messages"


def test_deeply_nested_messages() -> None:
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(InvalidParameter, match="nested"):
        render(chat_templates.CHATML, [{"role": "user", "content": "x", "extra": nested}])


def test_invalid_template() -> None:
    with pytest.raises(InvalidParameter, match="broken in line 2"):
        render("a\n{% if %}", [USER])


def test_missing_and_named_templates() -> None:
    with pytest.raises(InvalidParameter, match="no chat template"):
        ChatTemplate({}, SPECIAL).render([USER])
    template = ChatTemplate({"rag": "R", "default": "D", "tool_use": "T"}, SPECIAL)
    assert template.render([USER]) == "D"
    assert template.render([USER], tools=[TOOL]) == "T"
    assert template.render([USER], variables={"chat_template": "rag"}) == "R"
    for given in ("{{ 1 }}", ["rag"]):
        with pytest.raises(InvalidParameter, match=r"no template.*default, rag, tool_use"):
            template.render([USER], variables={"chat_template": given})


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**7) %}x{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * [1] }}",
        "{{ 9 ** 99999999 }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ messages[0].content + 1 }}",
        "{{ undefined.field }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_sandbox_violations(source: str) -> None:
    with pytest.raises(InvalidParameter, match="template fails"):
        render(source, [USER])


def test_output_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% for i in range(1000) %}{{ i }}{{ messages[0].content }}{% endfor %}"
    monkeypatch.setattr(module, "MAX_PROMPT_CHARS", 1000)
    with pytest.raises(InvalidParameter, match="stopped"):
        render(source, [USER])
    monkeypatch.setattr(module, "MAX_PROMPT_CHARS", 10**9)
    monkeypatch.setattr(module, "MAX_SECONDS", -1.0)
    with pytest.raises(InvalidParameter, match="stopped"):
        render(source, [USER])
