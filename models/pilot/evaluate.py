"""Ask the shipped model all its questions with greedy decoding and count exact answers.

usage: python models/pilot/evaluate.py [--all]       exits 1 below 97 % of the canonical questions

Without --all only the canonical phrasing of each question is asked; with it every one, and those held out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from corpus_format import Entry, read_corpus
from outside import REFUSAL, read_held_out
from phrasings import HELD_OUT
from rich.console import Console
from rich.table import Table
from tool_examples import make_example
from train import MODEL

from neso.engine.client.llm import LLM
from neso.generation import Completion, FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=200)
THRESHOLD = 0.97
FOLDER = Path(__file__).parent
TOOL_EXAMPLES = 200


@dataclass(frozen=True, slots=True)
class Score:
    """Fractions of answers that are right, and that ended with an end token."""

    name: str
    asked: int
    right: float
    ended: float


def evaluate(llm: LLM, *, everything: bool) -> list[Score]:
    """Return all scores. The threshold applies to the first two."""
    entries = read_corpus()
    canonical = [(entry.questions[0], entry.answer) for entry in entries]
    scores = [
        _completions(llm, "completion, canonical question", canonical),
        _chats(llm, "chat, canonical question", canonical),
    ]
    if everything:
        phrased = [(question, entry.answer) for entry in entries for question in entry.questions]
        scores += [
            _completions(llm, "completion, all phrasings", phrased),
            _chats(llm, "chat, all phrasings", phrased),
        ]
    held_out = _held_out(entries)
    scores += [_chats(llm, "chat, phrasings never seen", held_out), _tools(llm), _json(llm, entries)]
    answers = {entry.questions[0]: entry.answer for entry in entries}
    inside = [(question, answers[name]) for question, name in read_held_out(FOLDER / "held_out_inside.txt")]
    outside = [(question, REFUSAL) for question, _ in read_held_out(FOLDER / "held_out_outside.txt")]
    for name, pairs in (("inside the corpus, new words", inside), ("outside the corpus, refused", outside)):
        scores += [_completions(llm, f"completion, {name}", pairs), _chats(llm, f"chat, {name}", pairs)]
    return scores


def _held_out(entries: list[Entry]) -> list[tuple[str, str]]:
    return [
        (HELD_OUT[entry.kind].format(entry.questions[0].removeprefix(prefix).rstrip("?")), entry.answer)
        for entry in entries
        for prefix in ("What is ", "How do I ")
        if entry.kind in HELD_OUT and entry.questions[0].startswith(prefix)
    ]


def _completions(llm: LLM, name: str, pairs: Sequence[tuple[str, str]]) -> Score:
    outputs = _generate(llm, [question for question, _ in pairs])
    return _score(name, outputs, [answer for _, answer in pairs])


def _chats(llm: LLM, name: str, pairs: Sequence[tuple[str, str]]) -> Score:
    template = llm.tokenizer.apply_chat_template
    outputs = _generate(llm, [template([{"role": "user", "content": question}]) for question, _ in pairs])
    return _score(name, outputs, [answer for _, answer in pairs])


def _tools(llm: LLM) -> Score:
    rng = random.Random(12345)
    examples = [make_example(rng) for _ in range(TOOL_EXAMPLES)]
    template = llm.tokenizer.apply_chat_template
    outputs = _generate(llm, [template(example.messages, tools=example.tools) for example in examples])
    return _score("tool calls and their reports", outputs, [example.answer for example in examples])


def _json(llm: LLM, entries: list[Entry]) -> Score:
    questions = [entry.questions[0] for entry in entries if entry.kind == "json"]
    outputs = _generate(llm, questions)
    valid = sum(_is_json(output.text) for output in outputs)
    ended = sum(output.finish_reason is FinishReason.STOP for output in outputs)
    return Score("JSON that parses", len(outputs), valid / len(outputs), ended / len(outputs))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _generate(llm: LLM, prompts: list[str]) -> list[Completion]:
    return [result.outputs[0] for result in llm.generate(prompts, GREEDY)]


def _score(name: str, outputs: list[Completion], answers: list[str]) -> Score:
    right = sum(output.text.strip() == answer for output, answer in zip(outputs, answers, strict=True))
    ended = sum(output.finish_reason is FinishReason.STOP for output in outputs)
    return Score(name, len(outputs), right / len(outputs), ended / len(outputs))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    scores = evaluate(LLM(MODEL), everything=parser.parse_args().all)
    table = Table("", "asked", "right", "ended by itself")
    for score in scores:
        table.add_row(score.name, str(score.asked), f"{score.right:.1%}", f"{score.ended:.1%}")
    Console().print(table)
    return int(min(score.right for score in scores[:2]) < THRESHOLD)


if __name__ == "__main__":
    sys.exit(main())
