"""Detokenizer and stop strings together, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import BACKENDS

from neso.engine.text.stop_strings import SequenceText, TextDelta
from neso.engine.text.tokenizer import Tokenizer
from neso.engine.text.tokenizer_files import SpecialTokens

NO_SPECIALS = SpecialTokens(texts={}, bos_id=None, eos_ids=(), pad_id=None)
TOKENIZERS = {name: Tokenizer(make(), NO_SPECIALS, {}) for name, make in BACKENDS.items()}
BYTES = TOKENIZERS["byte_level"]


def sequence(
    tokenizer: Tokenizer = BYTES, *stop: str, include: bool = False, min_tokens: int = 0
) -> SequenceText:
    return SequenceText(
        tokenizer.detokenizer(), stop, include_stop_str_in_output=include, min_tokens=min_tokens
    )


def letters(text: str) -> list[int]:
    """One token a letter."""
    return [token_id for letter in text for token_id in BYTES.encode(letter)]


@pytest.mark.parametrize("style", BACKENDS)
@given(
    token_ids=st.lists(st.integers(0, 450), max_size=20),
    stop=st.lists(st.sampled_from(["e", " ", "o ", "\ufffd", "th", "\n", "ell", "▁"]), max_size=3),
    size=st.integers(1, 5),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_chunks_of_tokens_do_not_matter(
    style: str, token_ids: list[int], stop: list[str], size: int, min_tokens: int, include: bool
) -> None:
    """Adding tokens one by one or several at once gives the same text, stop string and number of tokens."""

    def run(step: int) -> tuple[str, str | None, int]:
        text = sequence(TOKENIZERS[style], *stop, include=include, min_tokens=min_tokens)
        shown, kept = "", 0
        for start in range(0, len(token_ids), step):
            delta = text.add(token_ids[start : start + step])
            shown, kept = shown + delta.text, kept + delta.num_tokens_kept
            if delta.stop_reason is not None:
                break
        return shown + text.finish(), text.stop_reason, kept

    shown, reason, kept = run(1)
    assert run(size) == (shown, reason, kept)
    whole = TOKENIZERS[style].decode(token_ids[:kept])
    if reason is None:
        assert (kept, shown) == (len(token_ids), whole)
    else:
        assert whole.startswith(shown)
        assert kept > min_tokens or kept == len(token_ids)
    if reason is not None and not include:
        assert whole[len(shown) :].startswith(reason)


def test_stop_string_within_several_tokens() -> None:
    text = sequence(BYTES, "END")
    assert text.add(letters("okE")) == TextDelta("ok", None, 3)
    assert text.add(letters("NDxyz")) == TextDelta("", "END", 2)
    assert text.add(letters("more")) == TextDelta("", "END", 0)
    assert text.finish() == ""


def test_stop_string_can_be_included() -> None:
    text = sequence(BYTES, "END", include=True)
    assert text.add(letters("okENDxyz")) == TextDelta("okEND", "END", 5)


def test_finish_gives_back_what_was_held() -> None:
    text = sequence(BYTES, "END")
    assert text.add(letters("okEN")) == TextDelta("ok", None, 4)
    assert text.finish() == "EN"


def test_min_tokens() -> None:
    text = sequence(BYTES, "b", min_tokens=2)
    assert text.add(letters("abab")) == TextDelta("aba", "b", 4)


def test_stop_string_that_reaches_over_min_tokens_counts() -> None:
    text = sequence(BYTES, "bc", min_tokens=2)
    assert text.add(letters("abcd")) == TextDelta("a", "bc", 3)


def test_stop_string_of_a_byte_token_acts_at_once() -> None:
    llama = TOKENIZERS["llama"]
    newline = llama.backend.token_to_id("<0x0A>")
    assert sequence(llama, "\n").add([newline, newline]) == TextDelta("", "\n", 1)


def test_stop_string_completed_by_the_flush() -> None:
    """An incomplete character at the end becomes U+FFFD, which can be a stop string too."""
    incomplete = BYTES.encode("日")[:1]
    text = sequence(BYTES, "\ufffd")
    assert text.add(incomplete) == TextDelta("", None, 1)
    assert text.finish() == ""
    assert text.stop_reason == "\ufffd"
