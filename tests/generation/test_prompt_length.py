"""Long prompts are rejected, and cut, without tokenizing all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from neso.generation import PromptTooLong, count_tokens, cut_text, encode_prompt, encode_text

CONTEXT = 100


class CountingTokenizer:
    """A token per `chars_per_token` characters. Counts the characters that it tokenizes."""

    def __init__(self, chars_per_token: int = 4) -> None:
        self.num_chars = 0
        self._size = chars_per_token

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_chars += len(text)
        return [ord(text[i]) for i in range(0, len(text), self._size)]


def rejected(call: Callable[[], Any]) -> PromptTooLong:
    with pytest.raises(PromptTooLong) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("chars_per_token", [1, 4, 30])
def test_work_to_reject_a_long_prompt_depends_on_the_context_only(chars_per_token: int) -> None:
    work = []
    for length in (100_000, 5_000_000):
        tokenizer = CountingTokenizer(chars_per_token)
        error = rejected(lambda: encode_prompt(tokenizer, "a" * length, CONTEXT))  # type: ignore[arg-type]  # noqa: B023
        assert error.field == "prompt" and error.num_tokens > CONTEXT
        assert f"is at least {error.num_tokens} tokens long" in error.message
        work.append(tokenizer.num_chars)
    assert work[0] == work[1] < 40 * chars_per_token * CONTEXT


def test_long_text_that_fits_is_tokenized() -> None:
    tokenizer = CountingTokenizer(10_000)  # as of a long word without a token of its own
    assert len(encode_prompt(tokenizer, "a" * 500_000, CONTEXT)) == 50  # type: ignore[arg-type]


def test_usual_prompts_are_tokenized_once() -> None:
    tokenizer = CountingTokenizer()
    encode_prompt(tokenizer, "a" * 8 * CONTEXT, CONTEXT)  # type: ignore[arg-type]
    assert tokenizer.num_chars == 8 * CONTEXT


def test_long_text_is_rejected_in_a_thread() -> None:
    rejected(lambda: asyncio.run(encode_text(CountingTokenizer(), "a" * 100_000, max_model_len=CONTEXT)))  # type: ignore[arg-type]


def test_cut_texts_have_the_tokens_at_their_side() -> None:
    tokenizer = CountingTokenizer()
    text = "".join(chr(97 + i % 26) for i in range(100_000))
    start, at_least = cut_text(tokenizer, text, CONTEXT)  # type: ignore[arg-type]
    assert text.startswith(start) and CONTEXT < at_least <= len(start) / 4
    end, _ = cut_text(tokenizer, text, CONTEXT, from_end=True)  # type: ignore[arg-type]
    assert text.endswith(end) and len(end) == len(start)
    assert tokenizer.encode(end)[-CONTEXT:] == tokenizer.encode(text)[-CONTEXT:]
    assert cut_text(tokenizer, text, 25_000) == (text, 0)  # type: ignore[arg-type]


def test_tokens_of_a_long_text_are_counted_in_pieces() -> None:
    tokenizer = CountingTokenizer()
    assert count_tokens(tokenizer, "", add_special_tokens=False) == 0  # type: ignore[arg-type]
    assert count_tokens(tokenizer, "a" * 10) == 3  # type: ignore[arg-type]
    assert count_tokens(tokenizer, "a" * (3 << 20)) == 3 << 18  # type: ignore[arg-type]
