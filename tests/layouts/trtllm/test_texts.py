"""The texts of tensorrt_llm_bls: exact with any postprocessing that decodes lists of tokens by themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import neso.layouts.trtllm

TESTS = Path(__file__).parents[2]
MODELS = Path(neso.layouts.trtllm.__file__).parent / "models"
sys.path[:0] = [str(TESTS / "engine"), str(MODELS / "tensorrt_llm_bls")]

from small_tokenizers import byte_level_backend, llama_backend, wordpiece_backend  # noqa: E402

from texts import REPLACEMENT, GrowingText, Texts, cut  # noqa: E402

TEXTS = (
    "héllo 你好, 🎉🎉 ça va? The end.\n\n  Indented",
    "Hello world, how are you today?",
    " 日本語 👨‍👩‍👧",
)
PROMPT = "The quick"


class Decoder:
    """Postprocessing, of the library's own decoder, and how often it was asked."""

    def __init__(self, backend) -> None:
        self.backend = backend
        self.calls = 0

    async def __call__(self, sequences: list[list[int]]) -> list[str]:
        self.calls += 1
        return [self.backend.decode(ids, skip_special_tokens=True) for ids in sequences]


@pytest.fixture(params=[byte_level_backend, llama_backend, wordpiece_backend])
def backend(request):
    return request.param()


def pair(backend, text: str) -> tuple[list[int], list[int], str]:
    """A prompt, what follows, and its text: whatever the library says both are, without the prompt."""
    ids = backend.encode(PROMPT + text).ids
    prompt, rest = ids[:2], ids[2:]
    before = backend.decode(prompt)
    whole = backend.decode(ids)
    assert whole.startswith(before)
    return prompt, rest, whole[len(before) :]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 5])
async def test_pieces_are_the_whole(backend, text, size):
    prompt, rest, expected = pair(backend, text)
    growing = GrowingText(Decoder(backend), prompt, [])
    pieces = [await growing.add(rest[i : i + size]) for i in range(0, len(rest), size)]
    pieces.append(await growing.finish())
    assert "".join(pieces) == growing.shown == expected
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert await growing.finish() == ""


async def test_an_end_within_a_character():
    backend = byte_level_backend()
    prompt, rest, _ = pair(backend, " 🎈")
    growing = GrowingText(Decoder(backend), prompt, [])
    for token in rest[:-1]:
        assert REPLACEMENT not in await growing.add([token])
    assert (await growing.finish()).strip() == REPLACEMENT
    # Bytes that will never be a character do not hold back what follows.
    stray = backend.token_to_id("ð")
    growing = GrowingText(Decoder(backend), prompt, [])
    pieces = [await growing.add([stray]) for _ in range(8)]
    assert any(pieces)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("word", ["lo w", "world", "d,", "d, how are"])
async def test_stop_words_end_the_text(word, size):
    backend = byte_level_backend()
    prompt, rest, whole = pair(backend, " Hello world, how are you")
    growing = GrowingText(Decoder(backend), prompt, ["nothing", word])
    pieces = [await growing.add(rest[i : i + size]) for i in range(0, len(rest), size)]
    assert "".join(pieces) == whole[: whole.index(word) + len(word)]
    assert growing.stopped and await growing.finish() == "" and await growing.add(rest) == ""


@pytest.mark.parametrize(
    ("text", "words", "start", "expected"),
    [
        ("abcabc", ["bc"], 0, ("abc", True)),
        ("abcabc", ["bc"], 3, ("abcabc", True)),  # the first one was there before
        ("abcd", ["d", "bc"], 0, ("abc", True)),
        ("abcd", ["x"], 0, ("abcd", False)),
        ("abcd", [], 0, ("abcd", False)),
        ("", ["x"], 0, ("", False)),
    ],
)
def test_cut(text, words, start, expected):
    assert cut(text, words, start) == expected


@pytest.mark.parametrize("includes_prompt", [True, False])
@pytest.mark.parametrize("text", TEXTS)
async def test_whole_sequences(backend, text, includes_prompt):
    prompt, rest, expected = pair(backend, text)
    decoder = Decoder(backend)
    texts = Texts(decoder, prompt, [], streams=False, accumulates=False, num_sequences=1)
    before = backend.decode(prompt) if includes_prompt else ""
    given = [prompt + rest, prompt] if includes_prompt else [rest, []]
    assert await texts.of(0, given) == [before + expected, before]
    assert decoder.calls == 1
    assert await texts.finish() == {} and not texts.stopped


async def test_a_stop_word_of_the_prompt_ends_nothing():
    backend = byte_level_backend()
    prompt, rest, expected = pair(backend, " quick brown fox")
    texts = Texts(
        Decoder(backend), prompt, ["The", "brown"], streams=False, accumulates=False, num_sequences=1
    )
    shown = expected[: expected.index("brown") + 5]
    assert await texts.of(0, [prompt + rest]) == [backend.decode(prompt) + shown]


async def test_sequences_side_by_side():
    backend = byte_level_backend()
    prompt, rest, expected = pair(backend, " Hello world")
    texts = Texts(Decoder(backend), prompt, ["world"], streams=True, accumulates=True, num_sequences=2)
    told = [await texts.of(0, [[token]]) for token in rest]
    assert told[-1] == [expected] and not texts.stopped
    assert await texts.of(0, [rest]) is None
    assert await texts.of(1, [rest]) == [expected]
    assert texts.stopped
