"""Training samples: a prompt and its answer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from corpus_format import Entry
from tool_examples import make_example

from neso.engine.text.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that knows about model serving.",
    "Answer briefly.",
    "You are an expert on inference servers.",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids. The loss covers only the answer, which ends with an end token."""

    prompt: list[int]
    answer: list[int]


class SampleMaker:
    """Draws samples of all kinds. Prompts use the same chat template as the server."""

    def __init__(self, tokenizer: Tokenizer, entries: list[Entry], seed: int, tool_share: float) -> None:
        self._tokenizer = tokenizer
        self._entries = entries
        self._tool_share = tool_share
        self._rng = random.Random(seed)

    def epoch(self) -> list[Sample]:
        """Return each entry as a completion and as a chat, and `tool_share` tool calls per entry."""
        samples = [self._completion(entry) for entry in self._entries]
        samples += [self._chat(entry) for entry in self._entries]
        samples += [self._tool() for _ in range(round(self._tool_share * len(self._entries)))]
        self._rng.shuffle(samples)
        return samples

    def _question(self, entry: Entry) -> str:
        # The canonical question is drawn more often than any other.
        return entry.questions[0] if self._rng.random() < 0.3 else self._rng.choice(entry.questions)

    def _completion(self, entry: Entry) -> Sample:
        return self._sample(self._question(entry), f" {entry.answer}{END_OF_TEXT}")

    def _chat(self, entry: Entry) -> Sample:
        messages = [{"role": "user", "content": self._question(entry)}]
        for _ in range(self._rng.choice([0, 0, 0, 1, 2])):
            earlier = self._rng.choice(self._entries)
            messages = [
                {"role": "user", "content": self._question(earlier)},
                {"role": "assistant", "content": earlier.answer},
                *messages,
            ]
        if self._rng.random() < 0.3:
            messages.insert(0, {"role": "system", "content": self._rng.choice(SYSTEM_PROMPTS)})
        return self._sample(self._render(messages), f"{entry.answer}{END_OF_TURN}")

    def _tool(self) -> Sample:
        example = make_example(self._rng)
        return self._sample(self._render(example.messages, example.tools), f"{example.answer}{END_OF_TURN}")

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        return self._tokenizer.apply_chat_template(messages, tools=tools)

    def _sample(self, prompt: str, answer: str) -> Sample:
        return Sample(self._tokenizer.encode(prompt), self._tokenizer.encode(answer))
