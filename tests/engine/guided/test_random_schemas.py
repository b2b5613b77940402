"""Outputs of a random model for random schemas are valid or truncated."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from random_schemas import random_schema

from neso.engine.client.llm import LLM
from neso.generation import (
    FinishReason,
    GenerationOutput,
    GuidedDecoding,
    InvalidParameter,
    SamplingParams,
)

FEW, MANY = 300, 1000
BATCH = 32


@pytest.fixture(scope="module")
def llm(llama_checkpoint: Path) -> LLM:
    return LLM(llama_checkpoint, num_threads=1)


def answers(llm: LLM, requests: list[SamplingParams]) -> list[tuple[str, str]]:
    """Return text and finish reason of each concurrent request; for a refused request the text is its error."""
    started = [start(llm.stream("The quick", params)) for params in requests]
    return [join(outputs) for outputs in started]


def start(stream: Iterator[GenerationOutput]) -> Iterator[GenerationOutput]:
    """Return the same outputs for a request that has started."""
    try:
        first = next(stream)
    except InvalidParameter as error:
        return refusal(error)
    return itertools.chain([first], stream)


def refusal(error: InvalidParameter) -> Iterator[GenerationOutput]:
    raise error
    yield


def join(outputs: Iterator[GenerationOutput]) -> tuple[str, str]:
    text, reason = "", ""
    try:
        for output in outputs:
            for delta in output.deltas:
                text += delta.text
                reason = delta.finish_reason.value if delta.finish_reason else ""
    except InvalidParameter as error:
        return str(error), "refused"
    return text, reason


def params_for(seed: int, schema: dict[str, Any]) -> SamplingParams:
    guided = GuidedDecoding(json=schema, disable_any_whitespace=seed % 2 == 0)
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=400, guided_decoding=guided)


def check_schemas(llm: LLM, seeds: range) -> Counter[str]:
    """Generate for the schemas of `seeds`; count the finish reasons. Invalid outputs fail the test."""
    ends: Counter[str] = Counter()
    for start in range(seeds.start, seeds.stop, BATCH):
        batch = range(start, min(start + BATCH, seeds.stop))
        schemas = [random_schema(seed) for seed in batch]
        found = answers(llm, [params_for(seed, schema) for seed, schema in zip(batch, schemas, strict=True)])
        for seed, schema, (text, reason) in zip(batch, schemas, found, strict=True):
            ends[reason] += 1
            if reason == FinishReason.STOP.value:
                assert_valid(text, schema, f"seed {seed}")
            elif reason == "refused":
                print(f"seed {seed}: {text}: {json.dumps(schema)}")
    llm.core.check_integrity()
    return ends


def assert_valid(text: str, schema: dict[str, Any], name: str) -> None:
    """Validate against the schema with an independent library."""
    try:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError) as error:
        raise AssertionError(f"{name}: {text!r} for {json.dumps(schema)}: {error}") from None


def assert_most_end(ends: Counter[str], count: int) -> None:
    """A random model writes long texts, so some outputs are truncated. Refusals must be rare."""
    assert ends["stop"] + ends["length"] + ends["refused"] == count
    assert ends["stop"] > 0.6 * count
    assert ends["refused"] <= 0.02 * count


def test_outputs_match_random_schemas(llm: LLM) -> None:
    assert_most_end(check_schemas(llm, range(FEW)), FEW)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_outputs_match_many_random_schemas(llm: LLM) -> None:
    assert_most_end(check_schemas(llm, range(FEW, MANY)), MANY - FEW)
