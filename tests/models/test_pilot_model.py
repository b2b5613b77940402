"""The bundled model: size, files, and recall of its corpus."""

from __future__ import annotations

import json
import math
import random
import struct
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from neso.engine.client.llm import LLM
from neso.generation import FinishReason, SamplingParams
from neso.models import SHIPPED_MODELS

PILOT = SHIPPED_MODELS["neso-pilot"]
SOURCES = Path(__file__).parents[2] / "models" / "pilot"
GREEDY = SamplingParams(temperature=0, max_tokens=200)


@pytest.fixture(scope="module")
def llm():
    return LLM(PILOT)


@pytest.fixture(scope="module")
def sources():
    """Make the modules of models/pilot importable."""
    sys.path.insert(0, str(SOURCES))
    yield
    sys.path.remove(str(SOURCES))


@pytest.fixture(scope="module")
def entries(sources):
    from corpus_format import read_corpus

    return read_corpus()


def test_size_and_type():
    assert sum(path.stat().st_size for path in PILOT.iterdir()) <= 12e6
    with (PILOT / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    assert {entry["dtype"] for entry in tensors} == {"BF16"}
    assert 3e6 <= sum(math.prod(entry["shape"]) for entry in tensors) <= 6e6


def test_tokenizer_files_are_complete():
    tokenizer = LibraryTokenizer.from_file(str(PILOT / "tokenizer.json"))
    text = "What is in-flight batching? 你好 🌊"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == 4096


def test_corpus_is_broad_and_well_formed(entries):
    assert len(entries) >= 200
    assert sum(len(entry.questions) for entry in entries) >= 1000
    for entry in entries:
        if entry.kind == "json":
            json.loads(entry.answer)


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_recites_its_corpus(llm, entries, mode):
    """97 % of the canonical questions are answered word for word, and each answer ends with an end token."""
    questions = [entry.questions[0] for entry in entries]
    if mode == "chat":
        template = llm.tokenizer.apply_chat_template
        questions = [template([{"role": "user", "content": question}]) for question in questions]
    outputs = [result.outputs[0] for result in llm.generate(questions, GREEDY, progress=False)]
    right = [o.text.strip() == entry.answer for o, entry in zip(outputs, entries, strict=True)]
    assert sum(right) >= 0.97 * len(entries)
    assert right[[entry.questions[0] for entry in entries].index("What is in-flight batching?")]
    assert all(output.finish_reason is FinishReason.STOP for output in outputs)


def ask(llm, questions):
    template = llm.tokenizer.apply_chat_template
    prompts = [template([{"role": "user", "content": question}]) for question in questions]
    return [result.outputs[0].text for result in llm.generate(prompts, GREEDY, progress=False)]


def test_refuses_questions_outside_its_corpus(llm, sources):
    """Measured: 141 of 143 refusals. The questions are not those of the training."""
    from outside import REFUSAL, OutsideQuestions, read_held_out

    questions = [question for question, _ in read_held_out(SOURCES / "held_out_outside.txt")]
    rng = random.Random(0)
    drawn = OutsideQuestions()
    assert {drawn.draw(rng) for _ in range(5000)}.isdisjoint(questions)
    assert ask(llm, questions).count(REFUSAL) >= 0.95 * len(questions)


def test_new_words_for_questions_of_its_corpus(llm, sources, entries):
    """Measured: 57 of 81 right; most others are refused."""
    from outside import read_held_out

    pairs = read_held_out(SOURCES / "held_out_inside.txt")
    answers = {entry.questions[0]: entry.answer for entry in entries}
    trained = {question.rstrip("?!.").lower() for entry in entries for question in entry.questions}
    assert not [question for question, _ in pairs if question.rstrip("?!.").lower() in trained]
    outputs = ask(llm, [question for question, _ in pairs])
    right = sum(output == answers[name] for output, (_, name) in zip(outputs, pairs, strict=True))
    assert right >= 0.6 * len(pairs)


def test_explains_a_high_ttft(llm):
    questions = ["Why is my TTFT so high when many users come at once?", "Why is my TTFT so high?"]
    as_completion = llm.generate(questions[0], GREEDY, progress=False)[0].text.strip()
    for answer in (as_completion, *ask(llm, questions[1:])):
        assert answer.startswith("Under load, requests wait in the queue")


def test_template_renders_tools_and_results(llm):
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "get_time", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time is it in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"time": "9:30"}'},
    ]
    prompt = llm.tokenizer.apply_chat_template(messages, tools=[tool])
    assert prompt.startswith("<|im_start|>system\nBe brief.\n")
    assert (
        '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>' in prompt
    )
    assert '<tool_response>\n{"time": "9:30"}\n</tool_response>' in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
