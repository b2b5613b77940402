"""Text of a sequence: stop strings, compared with a naive search of the whole text, and stop words."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import BACKENDS

from neso.engine.text.stop_strings import SequenceText, StopChecker, StopWordFilter, StopWords, TextDelta
from neso.engine.text.tokenizer import Tokenizer
from neso.engine.text.tokenizer_files import SpecialTokens


def cut(text: str, stop: list[str], include: bool, barrier: int = 0) -> tuple[str, str | None]:
    """Reference definition: the shortest prefix of `text` that ends in a stop string, the longest such stop string."""
    for end in range(barrier + 1, len(text) + 1):
        for word in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(word):
                return (text[:end] if include else text[: end - len(word)]), word
    return text, None


def feed(checker: StopChecker, chunks: list[str]) -> tuple[str, str | None]:
    shown = ""
    for chunk in chunks:
        text, matched = checker.add(chunk)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + checker.flush(), None


few = st.text(alphabet="abc", min_size=0, max_size=12)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


@given(st.lists(few, max_size=8), stops, st.booleans())
def test_text_ends_at_the_first_stop_string_for_any_chunks(
    chunks: list[str], stop: list[str], include: bool
) -> None:
    checker = StopChecker(stop, include_stop_str_in_output=include)
    assert feed(checker, chunks) == cut("".join(chunks), stop, include)


@given(
    st.lists(st.text(max_size=6), max_size=6),
    st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_stop_strings_in_any_unicode_text(chunks: list[str], stop: list[str]) -> None:
    assert feed(StopChecker(stop), chunks) == cut("".join(chunks), stop, False)


@given(st.lists(few, max_size=6), st.lists(few, max_size=6), stops, st.booleans())
def test_stop_strings_before_min_tokens_are_ignored(
    early: list[str], late: list[str], stop: list[str], include: bool
) -> None:
    checker = StopChecker(stop, include_stop_str_in_output=include)
    shown = "".join(checker.add(chunk, match=False).text for chunk in early)
    rest, matched = feed(checker, late)
    text = "".join(early + late)
    expected = cut(text, stop, include, barrier=len("".join(early)))
    assert (shown + rest, matched) == expected


@given(st.lists(few, max_size=8), stops)
def test_only_possible_starts_of_stop_strings_are_held_back(chunks: list[str], stop: list[str]) -> None:
    checker = StopChecker(stop)
    shown = text = ""
    for chunk in chunks:
        text += chunk
        piece, matched = checker.add(chunk)
        shown += piece
        if matched is not None:
            return
        held = text[len(shown) :]
        assert text == shown + held
        assert not held or any(word.startswith(held) for word in stop)


def test_a_stop_string_inside_a_longer_one_matches_first() -> None:
    checker = StopChecker(("abcd", "bc"))
    assert checker.add("xab") == ("x", None)
    assert checker.add("c") == ("a", "bc")
    assert checker.add("d") == ("", "bc")
    assert checker.flush() == ""


def test_the_longer_of_two_stop_strings_with_the_same_end_matches() -> None:
    assert StopChecker(("b", "ab")).add("xab!") == ("x", "ab")


def test_without_stop_strings_all_text_is_output() -> None:
    checker = StopChecker(())
    assert checker.add("abc") == ("abc", None)
    assert checker.flush() == ""


def test_empty_stop_string_is_rejected() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(("a", ""))


def test_long_stop_strings_are_fast() -> None:
    checker = StopChecker(("a" * 500 + "b",))
    shown = "".join(checker.add("a").text for _ in range(2000)) + checker.flush()
    assert shown == "a" * 2000


words = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(words=words, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20), cuts=st.integers(1, 5))
def test_output_ends_before_the_first_stop_word(words, tokens, cuts):
    end = next(
        (i for i in range(1, len(tokens) + 1) if any(tuple(tokens[:i])[-len(w) :] == w for w in words)), None
    )
    known = tokens if end is None else tokens[:end]
    checker = StopWordFilter(StopWords(words))
    shown: list[int] = []
    for start in range(0, len(known) - cuts, cuts):
        shown += checker.add(known[start : start + cuts])
        assert shown == known[: len(shown)]
    rest = known[len(shown) + checker.num_held :]
    last, word = checker.finish(rest, by_word=end is not None)
    if end is None:
        assert word is None and shown + last == known
    else:
        assert word == max((w for w in words if tuple(known)[-len(w) :] == w), key=len)
        assert shown + last == known[: -len(word)]


def test_many_long_stop_words_are_fast():
    words = [(7,) * 200 + (8 + i,) * 56 for i in range(1024)]
    checker = StopWordFilter(StopWords(words))
    started = time.thread_time()
    shown = [token for _ in range(500) for token in checker.add([7])]
    # Comparing every suffix of the text with every word took 26 ms per token.
    assert time.thread_time() - started < 4
    assert (len(shown), checker.num_held) == (300, 200)


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
    """One token per letter."""
    return [token_id for letter in text for token_id in BYTES.encode(letter)]


@pytest.mark.parametrize("style", BACKENDS)
@given(
    token_ids=st.lists(st.integers(0, 450), max_size=20),
    stop=st.lists(st.sampled_from(["e", " ", "o ", "\ufffd", "th", "\n", "ell", "▁"]), max_size=3),
    size=st.integers(1, 5),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_text_does_not_depend_on_chunks(
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


def test_finish_returns_the_held_back_text() -> None:
    text = sequence(BYTES, "END")
    assert text.add(letters("okEN")) == TextDelta("ok", None, 4)
    assert text.finish() == "EN"


def test_min_tokens() -> None:
    text = sequence(BYTES, "b", min_tokens=2)
    assert text.add(letters("abab")) == TextDelta("aba", "b", 4)


def test_stop_string_across_min_tokens_matches() -> None:
    text = sequence(BYTES, "bc", min_tokens=2)
    assert text.add(letters("abcd")) == TextDelta("a", "bc", 3)


def test_stop_string_of_a_byte_token_matches_at_once() -> None:
    llama = TOKENIZERS["llama"]
    newline = llama.backend.token_to_id("<0x0A>")
    assert sequence(llama, "\n").add([newline, newline]) == TextDelta("", "\n", 1)


def test_stop_string_completed_by_the_flush() -> None:
    """An incomplete character at the end becomes U+FFFD, which can be part of a stop string."""
    incomplete = BYTES.encode("日")[:1]
    text = sequence(BYTES, "\ufffd")
    assert text.add(incomplete) == TextDelta("", None, 1)
    assert text.finish() == ""
    assert text.stop_reason == "\ufffd"
