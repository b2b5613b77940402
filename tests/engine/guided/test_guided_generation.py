"""Guided decoding end to end on every runner: each kind of constraint, combined with other parameters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from neso.engine.client.llm import LLM
from neso.engine.core.request import EngineRequest
from neso.generation import (
    Completion,
    FinishReason,
    GenerationOutput,
    GuidedDecoding,
    InvalidParameter,
    SamplingParams,
)

PROMPT = "The quick"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
CALLS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["T"],
        "tags": [
            {"begin": "Tadd", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": ";"},
            {"begin": "Tsay", "content": {"type": "any_text"}, "end": "."},
            {"begin": "Tjson", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "!"},
        ],
    },
}
CALL = re.compile(r"T(add[0-9]{2};|say[^.]*\.|json\{[^{}]*\}!)", re.DOTALL)


@pytest.fixture(scope="module", params=["reference", "native", "torch"])
def llm(request: pytest.FixtureRequest, llama_checkpoint: Path) -> LLM:
    return LLM(llama_checkpoint, runner=request.param, num_threads=1)


def generate(llm: LLM, guided: dict[str, Any], n: int = 8, **params: Any) -> list[Completion]:
    params = {"temperature": 1.0, "max_tokens": 120, "seed": 3, **params}
    sampling = SamplingParams(n=n, guided_decoding=GuidedDecoding(**guided), **params)
    (result,) = llm.generate(PROMPT, sampling, progress=False)
    llm.core.check_integrity()
    assert llm.core.scheduler.kv.pool.num_used == 0
    return result.outputs


def complete(outputs: list[Completion], least: int = 1) -> list[str]:
    texts = [o.text for o in outputs if o.finish_reason is FinishReason.STOP]
    assert len(texts) >= least
    return texts


@pytest.mark.parametrize(
    "pattern", ["[0-9]{3}-[a-f]{1,6}", "^(yes|no)$", r"a.c", r"\w{2,5}é?", "(?i)neso", "x*y"], ids=str
)
def test_regex(llm: LLM, pattern: str) -> None:
    for text in complete(generate(llm, {"regex": pattern}), 4):
        assert re.fullmatch(pattern, text)


def test_choice(llm: LLM) -> None:
    choices = ("yes", "no", "yes, indeed", '"quoted" \\ line\n', "日本 👍")
    outputs = generate(llm, {"choice": choices}, n=24)
    assert {o.text for o in outputs} <= set(choices) and len({o.text for o in outputs}) > 2
    assert {o.finish_reason for o in outputs} == {FinishReason.STOP}


def test_json_schema(llm: LLM) -> None:
    for option in ({}, {"disable_any_whitespace": True}, {"whitespace_pattern": " ?"}):
        for text in complete(generate(llm, {"json": SCHEMA, **option})):
            jsonschema.validate(json.loads(text), SCHEMA)
            assert not re.search(r"\n\s*\n", text)
            if option:
                outside = re.sub(r'"(\\.|[^"\\])*"', "s", text)
                assert not re.search(r"\s\s|[\n\t]" if "whitespace_pattern" in option else r"\s", outside)


@pytest.mark.parametrize("guided", [{"json_object": True}, {"json": True}, {"json": '{"type": "object"}'}])
def test_any_object(llm: LLM, guided: dict[str, Any]) -> None:
    for text in complete(generate(llm, guided, n=16, max_tokens=200)):
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= greeting " " name\ngreeting ::= "hi" | "hello"\nname ::= [A-Z] [a-z]{1,3}',
        'start: greeting " " NAME\ngreeting: "hi" | "hello"\nNAME: /[A-Z][a-z]{1,3}/',
        '?start: greeting " " NAME\ngreeting: "hi"\n  | "hello" // a comment\nNAME: /[A-Z]/ /[a-z]/{1,3}',
    ],
    ids=["gbnf", "lark", "lark_rules"],
)
def test_grammars(llm: LLM, grammar: str) -> None:
    for text in complete(generate(llm, {"grammar": grammar}), 8):
        assert re.fullmatch("(hi|hello) [A-Z][a-z]{1,3}", text)


def test_nested_grammar(llm: LLM) -> None:
    grammar = 'root ::= "(" (root | "x") ")"'
    for text in complete(generate(llm, {"grammar": grammar})):
        assert re.fullmatch(r"\(+x\)+", text) and text.count("(") == text.count(")")


def test_structural_tags(llm: LLM) -> None:
    """After a trigger, the text must match one of the tags; other text is free."""
    bias = {llm.tokenizer.encode("T")[0]: 7.0}
    num_calls = 0
    for output in generate(llm, {"structural_tag": CALLS}, n=12, logit_bias=bias, max_tokens=150):
        rest = output.text
        while "T" in rest:
            rest = rest[rest.index("T") :]
            call = CALL.match(rest)
            if call is None:
                assert output.finish_reason is FinishReason.LENGTH, rest
                break
            num_calls += 1
            rest = rest[call.end() :]
    assert num_calls > 3


def test_required_tags(llm: LLM) -> None:
    tags = [
        {"begin": f"<{name}>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": f"</{name}>"}
        for name in ("a", "b")
    ]
    form = {"type": "tags_with_separator", "tags": tags, "separator": ", ", "at_least_one": True}
    one = re.compile(r"<(a|b)>[0-9]{2}</\1>")
    for text in complete(generate(llm, {"structural_tag": {"type": "structural_tag", "format": form}})):
        assert all(one.fullmatch(part) for part in text.split(", "))
    form["stop_after_first"] = True
    for text in complete(generate(llm, {"structural_tag": {"type": "structural_tag", "format": form}}), 8):
        assert one.fullmatch(text)
    sequence = {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "go: "},
            {"type": "or", "elements": [tags[0] | {"type": "tag"}, {"type": "const_string", "value": "-"}]},
        ],
    }
    for text in complete(
        generate(llm, {"structural_tag": {"type": "structural_tag", "format": sequence}}), 8
    ):
        assert re.fullmatch(r"go: (<a>[0-9]{2}</a>|-)", text)


def test_legacy_structural_tags(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [1, 20]}}, "additionalProperties": False}
    tag = {
        "type": "structural_tag",
        "triggers": ["T"],
        "structures": [{"begin": "Tcall=", "schema": schema, "end": ";"}],
    }
    bias = {llm.tokenizer.encode("T")[0]: 9.0}
    found = 0
    for output in generate(llm, {"structural_tag": tag}, n=12, logit_bias=bias, max_tokens=150):
        for part in output.text.split("T")[1:]:
            if ";" in part and part.startswith("call="):
                decoder = json.JSONDecoder()
                value, end = decoder.raw_decode(part.removeprefix("call="))
                jsonschema.validate(value, schema)
                assert part.removeprefix("call=")[end:].lstrip(" \n\r\t").startswith(";")
                found += 1
    assert found


# -- ends ---------------------------------------------------------------------------------------------------------


def test_complete_text_ends_immediately(llm: LLM) -> None:
    """If nothing can follow, no end token is needed, for any stop parameters."""
    for extra in ({}, {"ignore_eos": True}, {"min_tokens": 50}):
        (output,) = generate(llm, {"choice": ("hello",)}, n=1, **extra)
        assert (output.text, output.finish_reason, output.stop_reason) == ("hello", FinishReason.STOP, None)
        assert llm.tokenizer.decode(output.token_ids) == "hello", "all of its tokens are text"


def test_a_grammar_that_accepts_the_empty_text(llm: LLM) -> None:
    (output,) = generate(llm, {"regex": "x{0}"}, n=1)
    assert (output.text, output.finish_reason) == ("", FinishReason.STOP)
    with pytest.raises(InvalidParameter, match="nothing can follow"):
        generate(llm, {"regex": "x{0}"}, n=1, ignore_eos=True)


def test_end_tokens_where_text_may_continue(llm: LLM) -> None:
    eos = llm.tokenizer.eos_token_ids[0]
    bias = {eos: 60.0}
    outputs = generate(llm, {"regex": "ab+"}, logit_bias=bias)
    assert {o.text for o in outputs} == {"ab"}, "the end is taken as soon as it may be"
    assert all(o.token_ids[-1] == eos for o in outputs)
    for output in generate(llm, {"regex": "ab+"}, logit_bias=bias, min_tokens=6):
        assert len(output.token_ids) > 6 and re.fullmatch("ab+", output.text)
    for output in generate(llm, {"regex": "ab+"}, logit_bias=bias, ignore_eos=True, max_tokens=20):
        assert output.finish_reason is FinishReason.LENGTH and re.fullmatch("ab+", output.text)


def test_stop_tokens_end_complete_text(llm: LLM) -> None:
    (special,) = llm.tokenizer.encode("<|user|>", add_special_tokens=False)
    outputs = generate(llm, {"regex": "ab+"}, logit_bias={special: 60.0}, stop_token_ids=(special,))
    assert {(o.text, o.stop_reason) for o in outputs} == {("ab", special)}


def test_stop_strings(llm: LLM) -> None:
    for output in generate(llm, {"regex": "[a-d]{30}"}, stop=("b",)):
        assert re.fullmatch("[acd]*", output.text) and output.stop_reason in ("b", None)


def test_max_tokens(llm: LLM) -> None:
    for output in generate(llm, {"regex": "[a-d]{30}"}, max_tokens=2):
        assert output.finish_reason is FinishReason.LENGTH and re.fullmatch("[a-d]+", output.text)


# -- with other parameters -----------------------------------------------------------------------------------------


def test_seeds_penalties_and_logprobs(llm: LLM) -> None:
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5, "top_p": 0.9}
    first = generate(llm, {"json": SCHEMA}, logprobs=3, **params)
    again = generate(llm, {"json": SCHEMA}, logprobs=3, **params)
    assert [o.text for o in first] == [o.text for o in again]
    for output in first:
        assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
        # Log probabilities of the model: tokens that the grammar excludes keep their share.
        assert any(entry.rank > 1 for entry in output.logprobs)
        if output.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(output.text), SCHEMA)


def test_top_k_considers_only_allowed_tokens(llm: LLM) -> None:
    for output in generate(llm, {"choice": ("yes", "no")}, top_k=1):
        assert output.text in ("yes", "no")


def test_unguided_requests_are_unchanged(llm: LLM) -> None:
    """Rows with and without masks share a batch."""
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    guided = SamplingParams(temperature=0, max_tokens=30, guided_decoding=GuidedDecoding(json=SCHEMA))
    prompts = [PROMPT, "A server", "Voyager 2"]

    def tokens(results: list[GenerationOutput]) -> list[list[int]]:
        return [result.outputs[0].token_ids for result in results]

    alone = [llm.generate(prompt, free, progress=False)[0] for prompt in prompts]
    masked = [llm.generate(prompt, guided, progress=False)[0] for prompt in prompts]
    mixed = llm.generate([*prompts, *prompts], [free] * 3 + [guided] * 3, progress=False)
    assert tokens(mixed) == tokens([*alone, *masked])


@pytest.mark.parametrize(
    ("guided", "message"),
    [
        ({"regex": "a(b"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"grammar": "nothing like it"}, "Expected token"),
        ({"grammar": 'root = "a"'}, "Expected token"),
        ({"grammar": 'root ::= "a" other'}, "other"),
        ({"json": {"type": "object", "not": {}}}, "not"),
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"$ref": "#/$defs/none"}}, "none"),
        ({"json": {"$ref": "#"}}, "no text"),
        ({"structural_tag": {"type": "structural_tag"}}, "structures"),
        ({"structural_tag": {"type": "structural_tag", "triggers": ["<"], "structures": []}}, "at least one"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "song"}}}, "song"),
    ],
)
def test_invalid_grammars_name_their_field(llm: LLM, guided: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(message)) as caught:
        generate(llm, guided)
    assert caught.value.field == f"guided_decoding.{next(iter(guided))}"
    assert not llm.core.has_work
    llm.core.check_integrity()


def test_an_aborted_id_can_be_reused_immediately(llm: LLM) -> None:
    """The grammar of the first request is still being compiled; dropping it must not affect the second."""
    params = SamplingParams(temperature=0, max_tokens=8, guided_decoding=GuidedDecoding(regex="[a-c]{3}x{2}"))
    free = EngineRequest(
        request_id="same", prompt_token_ids=[7, 8, 9], sampling=SamplingParams(temperature=0), max_tokens=8
    )
    guided = EngineRequest(request_id="same", prompt_token_ids=[7, 8, 9], sampling=params, max_tokens=8)
    assert llm.core.add(free) == []
    llm.core.step()
    llm.core.abort("same")
    assert llm.core.add(guided) == []
    tokens = []
    for _ in range(1000):
        if not llm.core.has_work:
            break
        tokens += [token for output in llm.core.step() for token in output.token_ids]
    assert re.fullmatch("[a-c]{3}xx", llm.tokenizer.decode(tokens))
