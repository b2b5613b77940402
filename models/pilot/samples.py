"""Training samples: a prompt and its answer."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from corpus_format import Entry
from outside import REFUSAL, OutsideQuestions
from phrasings import vary
from tool_examples import make_example, random_tools

from neso.engine.text.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that knows about model serving.",
    "Answer briefly.",
    "You are an expert on inference servers.",
)
_NEEDS_TOOL = re.compile(r"weather|time|price|doing|docs|documentation", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids. The loss covers only the answer, which ends with an end token."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Shares:
    """Samples of an epoch beside the two of each entry, as a number per entry."""

    tools: float = 0.5
    outside: float = 0.0


class SampleMaker:
    """Draws samples of all kinds. Prompts use the same chat template as the server."""

    def __init__(self, tokenizer: Tokenizer, entries: list[Entry], seed: int, shares: Shares) -> None:
        self._tokenizer = tokenizer
        self._entries = entries
        self._shares = shares
        self._rng = random.Random(seed)
        self._outside = OutsideQuestions()
        asked = {question.rstrip("?!.").lower() for entry in entries for question in entry.questions}
        self._inside = frozenset(asked)

    def epoch(self) -> list[Sample]:
        """Return each entry as a completion and as a chat, tool calls, and refusals."""
        samples = [self._completion(self._question(entry), entry.answer) for entry in self._entries]
        samples += [self._chat(self._question(entry), entry.answer) for entry in self._entries]
        samples += [self._tool() for _ in range(round(self._shares.tools * len(self._entries)))]
        samples += [self._refusal() for _ in range(round(self._shares.outside * len(self._entries)))]
        self._rng.shuffle(samples)
        return samples

    def _question(self, entry: Entry) -> str:
        # The canonical question is drawn more often than any other.
        if self._rng.random() < 0.3:
            return entry.questions[0]
        question = self._rng.choice(entry.questions)
        # Questions outside the corpus are varied as well: the model must not tell the two apart by a variation.
        return vary(question, self._rng) if self._shares.outside else question

    def _outside_question(self) -> str:
        while True:
            question = self._outside.draw(self._rng)
            if question.rstrip("?!.").lower() not in self._inside:
                return vary(question, self._rng)

    def _refusal(self) -> Sample:
        question = self._outside_question()
        return (self._completion if self._rng.random() < 0.4 else self._chat)(question, REFUSAL)

    def _completion(self, question: str, answer: str) -> Sample:
        return self._sample(question, f" {answer}{END_OF_TEXT}")

    def _chat(self, question: str, answer: str) -> Sample:
        messages = [{"role": "user", "content": question}]
        for _ in range(self._rng.choice([0, 0, 0, 1, 2])):
            earlier_question, earlier_answer = self._turn()
            messages = [
                {"role": "user", "content": earlier_question},
                {"role": "assistant", "content": earlier_answer},
                *messages,
            ]
        if self._rng.random() < 0.3:
            messages.insert(0, {"role": "system", "content": self._rng.choice(SYSTEM_PROMPTS)})
        tools = None
        if self._shares.outside and self._rng.random() < 0.1 and not _NEEDS_TOOL.search(question):
            tools = random_tools(self._rng)
        return self._sample(self._render(messages, tools), f"{answer}{END_OF_TURN}")

    def _turn(self) -> tuple[str, str]:
        if self._shares.outside and self._rng.random() < 0.3:
            return self._outside_question(), REFUSAL
        entry = self._rng.choice(self._entries)
        return self._question(entry), entry.answer

    def _tool(self) -> Sample:
        example = make_example(self._rng)
        return self._sample(self._render(example.messages, example.tools), f"{example.answer}{END_OF_TURN}")

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        return self._tokenizer.apply_chat_template(messages, tools=tools)

    def _sample(self, prompt: str, answer: str) -> Sample:
        return Sample(self._tokenizer.encode(prompt), self._tokenizer.encode(answer))
