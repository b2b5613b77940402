"""Guided decoding in requests: accepted names and error messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from neso.generation import GuidedDecoding, InvalidParameter, SamplingParams

SCHEMA = {"type": "object", "properties": {"größe": {"maximum": 10**30}}}
TEXT = '{"type": "object", "properties": {"größe": {"maximum": 1000000000000000000000000000000}}}'
TAG = {
    "type": "structural_tag",
    "triggers": ["<f"],
    "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
}


@pytest.mark.parametrize(
    ("values", "kind", "expected", "field"),
    [
        ({"guided_json": SCHEMA}, "json", TEXT, "guided_json"),
        ({"guided_json": TEXT}, "json", TEXT, "guided_json"),
        ({"guided_json": "true"}, "json", True, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b"), "guided_choice"),
        ({"guided_choice": '["a", "b"]'}, "choice", ("a", "b"), "guided_choice"),
        ({"guided_grammar": "start: /a/"}, "grammar", "start: /a/", "guided_grammar"),
        ({"guided_json_object": "true"}, "json_object", True, "guided_json_object"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"guided_decoding": '{"choice": ["x"]}'}, "choice", ("x",), "guided_decoding.choice"),
        ({"response_format": '{"type": "json_object"}'}, "json_object", True, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            "json",
            TEXT,
            "response_format",
        ),
        ({"guided_decoding_guide_type": "json"}, "json_object", True, "guided_decoding_guide_type"),
        (
            {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": TEXT},
            "json",
            TEXT,
            "guided_decoding_guide",
        ),
        (
            {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": 'root ::= "a"'},
            "grammar",
            'root ::= "a"',
            "guided_decoding_guide",
        ),
    ],
)
def test_names_of_vllm_openai_and_tensorrt_llm(
    values: dict[str, Any], kind: str, expected: Any, field: str
) -> None:
    guided = SamplingParams.from_mapping(values).guided_decoding
    assert guided is not None
    assert (guided.kind, getattr(guided, kind), guided.field) == (kind, expected, field)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"guided_json": None, "guided_regex": None},
        {"guided_json_object": False},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None}},
    ],
)
def test_values_without_a_constraint(values: dict[str, Any]) -> None:
    assert SamplingParams.from_mapping(values).guided_decoding is None


def test_structural_tags_and_whitespace() -> None:
    for value in (TAG, msgspec.json.encode(TAG).decode()):
        for requested in ({"structural_tag": value}, {"response_format": value}):
            guided = SamplingParams.from_mapping(requested).guided_decoding
            assert guided is not None and guided.kind == "structural_tag"
            assert msgspec.json.decode(guided.structural_tag) == TAG
    guided = SamplingParams.from_mapping(
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}
    ).guided_decoding
    assert guided is not None and guided.whitespace_pattern == " ?"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"guided_choice": ["a"] * 20_000}, "guided_choice"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format"),
        ({"response_format": []}, "response_format"),
        ({"guided_decoding_guide_type": "yaml"}, "guided_decoding_guide_type"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide"),
        ({"guided_decoding_guide": "a"}, "guided_decoding_guide_type"),
    ],
)
def test_invalid_requests_name_their_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams.from_mapping(values)
    assert caught.value.field == field


def test_choice_accepts_a_list():
    guided = GuidedDecoding(choice=["a", "b"])
    assert guided == GuidedDecoding(choice=("a", "b")) and hash(guided)
    with pytest.raises(InvalidParameter, match="choices must be strings"):
        GuidedDecoding(choice="ab")


@pytest.mark.parametrize("fields", [{}, {"regex": "a", "json": {}}, {"json_object": True, "choice": ("a",)}])
def test_exactly_one_constraint_is_required(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="exactly one"):
        GuidedDecoding(**fields)


def test_serialization_round_trip() -> None:
    params = SamplingParams(guided_decoding=GuidedDecoding(json=SCHEMA, disable_any_whitespace=True))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    "values",
    [
        {"guided_choice": '["\\ud800"]'},
        {"guided_choice": ["a", "\ud800"]},
        {"guided_regex": "\ud800"},
        {"guided_json": {"const": "\ud800"}},
        {"structured_outputs": '{"grammar": "start: \\"\\ud800\\""}'},
        {"structured_outputs": {"json_object": True, "whitespace_pattern": "\ud800"}},
        {"response_format": '{"type": "json_schema", "json_schema": {"schema": {"const": "\\ud800"}}}'},
    ],
)
def test_lone_surrogates_are_rejected(values):
    """They cannot be encoded in a message to the engine."""
    with pytest.raises(InvalidParameter, match=r"not valid Unicode|no Unicode"):
        SamplingParams.from_mapping(values)
