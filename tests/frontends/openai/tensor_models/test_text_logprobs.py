"""Assignment of log probabilities to the tokens of pieces of text."""

from __future__ import annotations

from scripted_model import ScriptedText

from neso.frontends.openai.tensor_models.response_text import TextLogprobs
from neso.generation import TokenLogprobs

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
