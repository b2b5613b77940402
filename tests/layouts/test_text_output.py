"""Detokenization in tensorrt_llm_bls: exact with a postprocessing model that decodes each token list separately."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from neso.layouts.trtllm import MODELS

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "engine"), str(MODELS / "tensorrt_llm_bls")]

from small_tokenizers import byte_level_backend, llama_backend, wordpiece_backend  # noqa: E402

from text_output import REPLACEMENT, TextOutput, TextStream, cut_at_stop_word  # noqa: E402

TEXTS = (
    "héllo 你好, 🎉🎉 ça va? The end.\n\n  Indented",
    "Hello world, how are you today?",
    " 日本語 👨‍👩‍👧",
)
PROMPT = "The quick"


class Decoder:
    """A fake postprocessing model: decodes with the tokenizers library and counts its calls."""

    def __init__(self, backend) -> None:
        self.backend = backend
        self.calls = 0

    async def __call__(self, sequences: list[list[int]]) -> list[str]:
        self.calls += 1
        return [self.backend.decode(ids, skip_special_tokens=True) for ids in sequences]


@pytest.fixture(params=[byte_level_backend, llama_backend, wordpiece_backend])
def backend(request):
    return request.param()


def split_prompt(backend, text: str) -> tuple[list[int], list[int], str]:
    """Return prompt ids, generated ids, and the text that the generated ids add to the prompt."""
    ids = backend.encode(PROMPT + text).ids
    prompt, rest = ids[:2], ids[2:]
    before = backend.decode(prompt)
    whole = backend.decode(ids)
    assert whole.startswith(before)
    return prompt, rest, whole[len(before) :]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 5])
async def test_chunks_join_to_the_whole_text(backend, text, size):
    prompt, rest, expected = split_prompt(backend, text)
    stream = TextStream(Decoder(backend), prompt, [])
    pieces = [await stream.add(rest[i : i + size]) for i in range(0, len(rest), size)]
    pieces.append(await stream.finish())
    assert "".join(pieces) == stream.text == expected
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert await stream.finish() == ""


async def test_incomplete_character_is_held_back_until_finish():
    backend = byte_level_backend()
    prompt, rest, _ = split_prompt(backend, " 🎈")
    stream = TextStream(Decoder(backend), prompt, [])
    for token in rest[:-1]:
        assert REPLACEMENT not in await stream.add([token])
    assert (await stream.finish()).strip() == REPLACEMENT
    # Invalid bytes must not hold back the text after them.
    stray = backend.token_to_id("ð")
    stream = TextStream(Decoder(backend), prompt, [])
    pieces = [await stream.add([stray]) for _ in range(8)]
    assert any(pieces)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("word", ["lo w", "world", "d,", "d, how are"])
async def test_stop_word_ends_the_stream(word, size):
    backend = byte_level_backend()
    prompt, rest, whole = split_prompt(backend, " Hello world, how are you")
    stream = TextStream(Decoder(backend), prompt, ["nothing", word])
    pieces = [await stream.add(rest[i : i + size]) for i in range(0, len(rest), size)]
    assert "".join(pieces) == whole[: whole.index(word) + len(word)]
    assert stream.stopped and await stream.finish() == "" and await stream.add(rest) == ""


@pytest.mark.parametrize(
    ("text", "words", "start", "expected"),
    [
        ("abcabc", ["bc"], 0, ("abc", True)),
        ("abcabc", ["bc"], 3, ("abcabc", True)),  # the first match ends before `start`
        ("abcd", ["d", "bc"], 0, ("abc", True)),
        ("abcd", ["x"], 0, ("abcd", False)),
        ("abcd", [], 0, ("abcd", False)),
        ("", ["x"], 0, ("", False)),
    ],
)
def test_cut_at_stop_word(text, words, start, expected):
    assert cut_at_stop_word(text, words, start) == expected


@pytest.mark.parametrize("includes_prompt", [True, False])
@pytest.mark.parametrize("text", TEXTS)
async def test_whole_sequences(backend, text, includes_prompt):
    prompt, rest, expected = split_prompt(backend, text)
    decoder = Decoder(backend)
    output = TextOutput(decoder, prompt, [], streaming=False, accumulate=False, num_sequences=1)
    before = backend.decode(prompt) if includes_prompt else ""
    sequences = [prompt + rest, prompt] if includes_prompt else [rest, []]
    assert await output.add(0, sequences) == [before + expected, before]
    assert decoder.calls == 1
    assert await output.finish() == {} and not output.all_stopped


async def test_stop_word_in_the_prompt_is_ignored():
    backend = byte_level_backend()
    prompt, rest, expected = split_prompt(backend, " quick brown fox")
    output = TextOutput(
        Decoder(backend), prompt, ["The", "brown"], streaming=False, accumulate=False, num_sequences=1
    )
    text = expected[: expected.index("brown") + 5]
    assert await output.add(0, [prompt + rest]) == [backend.decode(prompt) + text]


async def test_streams_of_several_sequences_are_independent():
    backend = byte_level_backend()
    prompt, rest, expected = split_prompt(backend, " Hello world")
    output = TextOutput(Decoder(backend), prompt, ["world"], streaming=True, accumulate=True, num_sequences=2)
    texts = [await output.add(0, [[token]]) for token in rest]
    assert texts[-1] == [expected] and not output.all_stopped
    assert await output.add(0, [rest]) is None
    assert await output.add(1, [rest]) == [expected]
    assert output.all_stopped
