"""Texts and log probabilities in the responses of tensor models."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from scripted_model import ScriptedText

from neso.frontends.openai.tensor_models.response_text import OutputText, TextLogprobs
from neso.generation import TokenLogprobs


def read(response: OutputText, *parts: str | bytes) -> list[str]:
    """Return the text that each part adds, and the remaining text at the end."""
    texts = [response.add(part if isinstance(part, bytes) else part.encode()) for part in parts]
    return [*texts, response.finish()]


def test_character_split_over_responses() -> None:
    assert read(OutputText(), b"caf\xc3", b"\xa9!") == ["caf", "é!", ""]
    assert read(OutputText(), b"caf\xc3") == ["caf", "\ufffd"]


def test_repeated_prompt_is_removed() -> None:
    assert read(OutputText(prompts=["a b"]), "a b c") == [" c", ""]
    assert read(OutputText(prompts=["a b"]), "a", " b", " c") == ["", "", " c", ""]
    assert read(OutputText(prompts=[" a b", "x"]), "a b c") == [" c", ""]


def test_other_text_is_released_at_once() -> None:
    assert read(OutputText(prompts=["a b"]), "a c", " d") == ["a c", " d", ""]


def test_prompt_alone_is_kept() -> None:
    assert read(OutputText(prompts=["a b"]), "a b") == ["", "a b"]
    assert read(OutputText(prompts=["a b"]), "a") == ["", "a"]


def test_accumulated_text() -> None:
    assert read(OutputText(accumulates=True), "a", "a b", "a b\ufffd", "a b€") == ["a", " b", "", "€", ""]
    assert read(OutputText(accumulates=True, prompts=["p"]), "p", "p a", "p a b") == ["", " a", " b", ""]


def test_stop_string() -> None:
    response = OutputText(["END"])
    assert read(response, "one E", "ND two", "three") == ["one ", "", "", ""]
    assert response.stop_reason == "END"
    assert read(OutputText(["END"], include_stop=True), "one END") == ["one END", ""]


@given(
    st.text(),
    st.lists(st.integers(0, 60)),
    st.text(min_size=1, max_size=3),
    st.booleans(),
)
def test_result_does_not_depend_on_the_split(text: str, cuts: list[int], prompt: str, repeats: bool) -> None:
    data = ((prompt if repeats else "") + text).encode()
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    parts = [data[start:end] for start, end in pairwise(places)]
    whole = "".join(read(OutputText(["zz"], prompts=[prompt]), data))
    assert "".join(read(OutputText(["zz"], prompts=[prompt]), *parts)) == whole


TEXT = ScriptedText()
WORDS = "the quick brown"
IDS = TEXT.encode(WORDS, add_special_tokens=False)
NUMBERS = [-0.5 * (i + 1) for i in range(len(IDS))]


def logprobs_of(entries: list[TokenLogprobs]) -> list[tuple[int, str, float]]:
    return [(entry.token_id, entry.token, entry.logprob) for entry in entries]


def test_whole_text() -> None:
    expected = [(token, TEXT.decode([token]), number) for token, number in zip(IDS, NUMBERS, strict=True)]
    assert len(IDS) > 1
    assert logprobs_of(TextLogprobs(TEXT).add(WORDS, NUMBERS)) == expected
    assert logprobs_of(TextLogprobs(TEXT).add(WORDS, [*NUMBERS, -9.0])) == expected  # and an end token


def test_token_by_token() -> None:
    pieces = TextLogprobs(TEXT)
    entries = [
        entry
        for token, number in zip(IDS, NUMBERS, strict=True)
        for entry in pieces.add(TEXT.decode([token]), [number])
    ]
    assert logprobs_of(entries) == logprobs_of(TextLogprobs(TEXT).add(WORDS, NUMBERS))


def test_character_of_several_tokens() -> None:
    pieces = TextLogprobs(TEXT)
    tokens = TEXT.encode("你", add_special_tokens=False)
    assert len(tokens) == 3
    assert pieces.add("", [-1.0]) == pieces.add("", [-2.0]) == []
    assert [entry.token_id for entry in pieces.add("你", [-4.0])] == tokens


def test_mismatch_counts_as_one_token() -> None:
    assert logprobs_of(TextLogprobs(TEXT).add(WORDS, [-1.0])) == [(-1, WORDS, -1.0)]
    assert logprobs_of(TextLogprobs(None).add(WORDS, [-1.0, -2.0])) == [(-1, WORDS, -3.0)]
