"""Output formats: OpenAI's fields and the extensions, as guided decoding."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi_client import AsgiClient
from scripted_model import ScriptedModel

from neso.frontends.openai.tool_parsers import HermesParser

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def body(path: str, **fields: Any) -> dict[str, Any]:
    own = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return {"model": "scripted", **own, **fields}


async def guided(client: AsgiClient, script: ScriptedModel, path: str, **fields: Any) -> Any:
    response = await client.post(path, body(path, **fields))
    assert response.status == 200, response.body
    return script.requests[-1].sampling.guided_decoding


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "kind", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            "json",
            json.dumps(SCHEMA),
        ),
        ({"guided_json": SCHEMA}, "json", json.dumps(SCHEMA)),
        ({"guided_regex": "a*"}, "regex", "a*"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ("a",)),
    ],
)
async def test_output_formats(
    client: AsgiClient, script: ScriptedModel, path: str, fields: dict[str, Any], kind: str, expected: Any
) -> None:
    requested = await guided(client, script, path, **fields)
    assert (requested.kind, getattr(requested, kind)) == (kind, expected)
    assert requested.field.startswith(next(iter(fields)))


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}])
async def test_no_output_format(client: AsgiClient, script: ScriptedModel, fields: dict[str, Any]) -> None:
    assert await guided(client, script, CHAT, **fields) is None
    assert await guided(client, script, CHAT, **fields, tools=TOOLS, tool_choice="auto") is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": TOOLS[1:]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required", "tools": TOOLS, "guided_regex": "a"}, "tool_choice"),
    ],
)
async def test_invalid_output_formats(client: AsgiClient, fields: dict[str, Any], param: str) -> None:
    response = await client.post(CHAT, body(CHAT, **fields))
    assert response.status == 400 and response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "names", "many"),
    [
        ({"tool_choice": "required"}, ["weather", "time"], True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "time"], False),
        ({"tool_choice": NAMED}, ["weather"], False),
    ],
)
async def test_forced_calls(
    client: AsgiClient, script: ScriptedModel, fields: dict[str, Any], names: list[str], many: bool
) -> None:
    requested = await guided(client, script, CHAT, tools=TOOLS, **fields)
    assert (requested.kind, requested.field) == ("structural_tag", "tools")
    form = json.loads(requested.structural_tag)["format"]
    assert form["at_least_one"] and form["stop_after_first"] is not many
    for tag, name in zip(form["tags"], names, strict=True):
        # The parser reads text that matches the forced format.
        parsed = HermesParser().parse(tag["begin"] + '{"city": "Paris"}' + tag["end"])
        assert parsed.calls == [(name, '{"city": "Paris"}')] and parsed.content == ""
    schema = {**SCHEMA, "additionalProperties": False}
    assert form["tags"][0]["content"] == {"type": "json_schema", "json_schema": schema}


LEGACY_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<city>", "schema": SCHEMA, "end": "</city>"}],
    "triggers": ["<city>"],
}
TAG = {
    "type": "tag",
    "begin": "<city>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</city>",
}


@pytest.mark.parametrize(
    "tag",
    [
        LEGACY_TAG,
        {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": ["<city>"], "tags": [TAG]},
        },
    ],
    ids=["structures", "format"],
)
async def test_structural_tag_with_tools(
    client: AsgiClient, script: ScriptedModel, tag: dict[str, Any]
) -> None:
    """Free text with tags or calls: one format, because xgrammar supports neither nested structural tags nor free text
    as an alternative."""
    asked = await guided(client, script, CHAT, tools=TOOLS, response_format=tag)
    form = json.loads(asked.structural_tag)["format"]
    assert form["type"] == "triggered_tags"
    assert form["triggers"][0] == "<city>" and len(form["triggers"]) == 2
    assert form["tags"][0]["begin"] == "<city>"
    assert len(form["tags"]) == 1 + len(TOOLS)


async def test_other_structural_tag_with_tools(client: AsgiClient, script: ScriptedModel) -> None:
    fields = {"tools": TOOLS, "response_format": {"type": "structural_tag", "format": TAG}}
    form = json.loads((await guided(client, script, CHAT, **fields)).structural_tag)["format"]
    assert (form["type"], form["elements"][0], len(form["elements"])) == ("or", TAG, 2)
