"""Stop strings against a naive oracle that sees the text as a whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neso.engine.text.stop_strings import StopChecker


def cut(text: str, stop: list[str], include: bool, barrier: int = 0) -> tuple[str, str | None]:
    """The definition: the shortest beginning of `text` that ends in a stop string, the longest there."""
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
def test_any_chunks_give_the_text_cut_at_the_first_stop(
    chunks: list[str], stop: list[str], include: bool
) -> None:
    checker = StopChecker(stop, include_stop_str_in_output=include)
    assert feed(checker, chunks) == cut("".join(chunks), stop, include)


@given(
    st.lists(st.text(max_size=6), max_size=6),
    st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_with_any_unicode(chunks: list[str], stop: list[str]) -> None:
    assert feed(StopChecker(stop), chunks) == cut("".join(chunks), stop, False)


@given(st.lists(few, max_size=6), st.lists(few, max_size=6), stops, st.booleans())
def test_stops_do_not_count_before_the_barrier(
    early: list[str], late: list[str], stop: list[str], include: bool
) -> None:
    checker = StopChecker(stop, include_stop_str_in_output=include)
    shown = "".join(checker.add(chunk, match=False).text for chunk in early)
    rest, matched = feed(checker, late)
    text = "".join(early + late)
    expected = cut(text, stop, include, barrier=len("".join(early)))
    assert (shown + rest, matched) == expected


@given(st.lists(few, max_size=8), stops)
def test_held_text_is_only_what_may_become_a_stop(chunks: list[str], stop: list[str]) -> None:
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


def test_a_stop_inside_a_longer_one_ends_the_text_at_once() -> None:
    checker = StopChecker(("abcd", "bc"))
    assert checker.add("xab") == ("x", None)
    assert checker.add("c") == ("a", "bc")
    assert checker.add("d") == ("", "bc")
    assert checker.flush() == ""


def test_longer_of_two_that_end_together() -> None:
    assert StopChecker(("b", "ab")).add("xab!") == ("x", "ab")


def test_no_stop_strings_pass_everything() -> None:
    checker = StopChecker(())
    assert checker.add("abc") == ("abc", None)
    assert checker.flush() == ""


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(("a", ""))


def test_long_stop_strings_stay_cheap() -> None:
    checker = StopChecker(("a" * 500 + "b",))
    shown = "".join(checker.add("a").text for _ in range(2000)) + checker.flush()
    assert shown == "a" * 2000
