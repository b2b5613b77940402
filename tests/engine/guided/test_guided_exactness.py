"""Results of a guided request depend neither on the schedule nor on other requests in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neso.engine.client.llm import LLM
from neso.generation import GuidedDecoding, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
}
SHARED = "The quick brown fox jumps over the lazy dog. " * 2
REQUESTS = [
    (SHARED + "A", GuidedDecoding(json=SCHEMA), 1),
    (SHARED + "B", GuidedDecoding(regex="[a-z ]{40,}"), 3),
    (SHARED, None, 2),
    ("Voyager 2", GuidedDecoding(choice=("moons of Neptune", "moons", "one")), 2),
    (SHARED + "A", GuidedDecoding(grammar='start: ("a" /[0-9]+/ ";")+'), 1),
    ("def", None, 1),
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "no prefix cache": {"enable_prefix_caching": False},
    "small chunks": {"max_prefill_chunk": 3, "max_num_batched_tokens": 16, "max_num_seqs": 10},
    "tiny cache": {"num_blocks": 40, "block_size": 4},
    "few at once": {"max_num_seqs": 3},
    "torch": {"runner": "torch"},
    "torch without overlap": {"runner": "torch", "enable_overlap": False},
    "reference": {"runner": "reference"},
}


def answers(llm: LLM, temperature: float, *, together: bool = True) -> list[list[list[int]]]:
    sampling = [
        SamplingParams(temperature=temperature, seed=7, max_tokens=40, n=n, guided_decoding=guided)
        for _, guided, n in REQUESTS
    ]
    prompts = [prompt for prompt, _, _ in REQUESTS]
    if together:
        results = llm.generate(prompts, sampling, progress=False)
    else:
        results = [llm.generate(p, s, progress=False)[0] for p, s in zip(prompts, sampling, strict=True)]
    llm.core.check_integrity()
    return [[output.token_ids for output in result.outputs] for result in results]


@pytest.fixture(scope="module")
def expected(llama_checkpoint: Path) -> dict[float, list[list[list[int]]]]:
    llm = LLM(llama_checkpoint, num_threads=1)
    return {temperature: answers(llm, temperature, together=False) for temperature in (0.0, 1.0)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_results_do_not_depend_on_the_schedule(
    llama_checkpoint: Path, expected: dict[float, Any], schedule: str
) -> None:
    llm = LLM(llama_checkpoint, num_threads=1, **SCHEDULES[schedule])
    for temperature in (0.0, 1.0):
        assert answers(llm, temperature) == expected[temperature]
    if schedule == "tiny cache":
        assert llm.core.stats().preemptions
