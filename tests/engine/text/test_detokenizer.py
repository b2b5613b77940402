"""Incremental detokenization equals decoding of all tokens, for any tokens and chunks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import BACKENDS, byte_level_backend, llama_backend
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from neso.engine.text.detokenizer import Detokenizer, PieceDetokenizer, WindowDetokenizer
from neso.engine.text.tokenizer import Tokenizer
from neso.engine.text.tokenizer_files import SpecialTokens

NO_SPECIALS = SpecialTokens(texts={}, bos_id=None, eos_ids=(), pad_id=None)
TOKENIZERS = {name: Tokenizer(make(), NO_SPECIALS, {}) for name, make in BACKENDS.items()}
PIECEWISE = ["byte_level", "llama", "metaspace"]

emoji = st.sampled_from(
    ["👍🏽", "👨‍👩‍👧", "🇩🇪", "e\u0301", "日本", "한", "\u200d", " ", "\n", "a", "ğ", "<0x41>"]
)
texts = st.one_of(st.text(max_size=20), st.lists(emoji, max_size=12).map("".join))
ids = st.lists(st.integers(0, 460), max_size=24)
cuts = st.lists(st.integers(1, 4), min_size=1, max_size=30)


def stream(detokenizer: Detokenizer, token_ids: Sequence[int], sizes: Sequence[int] = (1,)) -> list[str]:
    """Return the texts for chunks of these sizes, in turn, and the last one at the end."""
    out, start, turn = [], 0, 0
    while start < len(token_ids):
        size = sizes[turn % len(sizes)]
        out.append(detokenizer.add(token_ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*out, detokenizer.finish()]


@pytest.mark.parametrize("style", BACKENDS)
@given(text=texts, sizes=cuts, skip=st.booleans())
def test_texts_equal_the_library(style: str, text: str, sizes: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[style]
    token_ids = tokenizer.encode(text)
    whole = tokenizer.backend.decode(token_ids, skip_special_tokens=skip)
    assert tokenizer.decode(token_ids, skip_special_tokens=skip) == whole
    pieces = stream(tokenizer.detokenizer(skip_special_tokens=skip), token_ids, sizes)
    assert "".join(pieces) == whole


@pytest.mark.parametrize("style", ["byte_level", "metaspace", "wordpiece"])
@given(token_ids=ids, sizes=cuts, skip=st.booleans())
def test_random_tokens_equal_the_library(
    style: str, token_ids: list[int], sizes: list[int], skip: bool
) -> None:
    tokenizer = TOKENIZERS[style]
    whole = tokenizer.backend.decode(token_ids, skip_special_tokens=skip)
    assert tokenizer.decode(token_ids, skip_special_tokens=skip) == whole
    assert "".join(stream(tokenizer.detokenizer(skip_special_tokens=skip), token_ids, sizes)) == whole


@given(token_ids=ids, sizes=cuts, skip=st.booleans())
def test_random_byte_fallback_tokens(token_ids: list[int], sizes: list[int], skip: bool) -> None:
    """Equal to the library except within runs of byte tokens that are not UTF-8 (see PieceDetokenizer)."""
    tokenizer = TOKENIZERS["llama"]
    ours = tokenizer.decode(token_ids, skip_special_tokens=skip)
    theirs = tokenizer.backend.decode(token_ids, skip_special_tokens=skip)
    assert "".join(stream(tokenizer.detokenizer(skip_special_tokens=skip), token_ids, sizes)) == ours
    if "\ufffd" not in theirs:
        assert ours == theirs
    names = [tokenizer.backend.id_to_token(i) for i in token_ids]
    special = ("<unk>", "<s>", "</s>") if skip else ()
    raw = b"".join(
        bytes([int(name[3:5], 16)]) if name.startswith("<0x") else name.replace("▁", " ").encode()
        for name in names
        if name is not None and name not in special
    )
    assert ours == raw.decode("utf-8", "replace").removeprefix(" ")


@pytest.mark.parametrize("style", PIECEWISE)
@given(token_ids=ids)
def test_incomplete_characters_are_held_back(style: str, token_ids: list[int]) -> None:
    """U+FFFD appears only where the whole text has it: each text is a prefix of the whole."""
    tokenizer = TOKENIZERS[style]
    whole = tokenizer.decode(token_ids)
    shown = ""
    for piece in stream(tokenizer.detokenizer(), token_ids):
        shown += piece
        assert whole.startswith(shown)


@given(text=texts)
def test_complete_characters_are_not_held_back(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer, raw, shown = tokenizer.detokenizer(), b"", ""
    for token_id in token_ids:
        raw += tokenizer.token_bytes(token_id) or b""
        shown += detokenizer.add([token_id])
        assert shown == raw.decode("utf-8", "ignore")


@pytest.mark.parametrize("make", [byte_level_backend, llama_backend])
@given(text=texts, sizes=cuts)
def test_window_detokenizer_equals_piece_detokenizer(make: object, text: str, sizes: list[int]) -> None:
    """The general and the fast implementation agree where both apply."""
    tokenizer = TOKENIZERS["byte_level" if make is byte_level_backend else "llama"]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(WindowDetokenizer(tokenizer.backend), token_ids, sizes)
    if make is byte_level_backend:
        assert "".join(pieces) == tokenizer.decode(token_ids)


def test_window_is_bounded_for_invalid_bytes() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    stray = tokenizer.backend.token_to_id("Ŀ")  # the byte 0x9D, which continues a character
    detokenizer = WindowDetokenizer(tokenizer.backend)
    for _ in range(100):
        detokenizer.add([stray])
        assert len(detokenizer._window) < 12


@pytest.mark.parametrize("style", PIECEWISE)
def test_piece_detokenizer_is_used(style: str) -> None:
    assert isinstance(TOKENIZERS[style].detokenizer(), PieceDetokenizer)
    assert isinstance(TOKENIZERS["wordpiece"].detokenizer(), WindowDetokenizer)


def test_unknown_decoders_use_the_window_detokenizer() -> None:
    backend = Backend(models.BPE())
    assert isinstance(Tokenizer(backend, NO_SPECIALS, {}).detokenizer(), WindowDetokenizer)
    backend.decoder = decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()])  # type: ignore[list-item]
    assert isinstance(Tokenizer(backend, NO_SPECIALS, {}).detokenizer(), WindowDetokenizer)


def test_split_bytes_are_held_back() -> None:
    tokenizer = TOKENIZERS["llama"]
    parts = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "🎉".encode()]
    assert stream(tokenizer.detokenizer(), [*parts, *parts[:2]]) == ["", "", "", "🎉", "", "", "\ufffd"]


def test_newline_byte_is_not_held_back() -> None:
    tokenizer = TOKENIZERS["llama"]
    newline = tokenizer.backend.token_to_id("<0x0A>")
    assert tokenizer.detokenizer().add([newline]) == "\n"


@pytest.mark.parametrize("style", ["llama", "metaspace"])
def test_a_continuation_keeps_its_space(style: str) -> None:
    tokenizer = TOKENIZERS[style]
    token_ids = tokenizer.encode("Hello world", add_special_tokens=False)
    split = next(n for n in range(1, 99) if tokenizer.decode(token_ids[:n]) == "Hello")
    prompt, rest = token_ids[:split], token_ids[split:]
    assert tokenizer.decode(rest) == "world"
    for before in (prompt, [1, *prompt], prompt * 3):
        assert "".join(stream(tokenizer.detokenizer(prompt_token_ids=before), rest)) == " world"
    assert "".join(stream(tokenizer.detokenizer(prompt_token_ids=[1]), rest)) == "world"


def test_wordpiece_continuation_keeps_its_space() -> None:
    tokenizer = TOKENIZERS["wordpiece"]
    token_ids = tokenizer.encode("Hello world")
    split = next(n for n in range(1, 99) if tokenizer.decode(token_ids[:n]) == "Hello")
    detokenizer = tokenizer.detokenizer(prompt_token_ids=token_ids[:split])
    assert "".join(stream(detokenizer, token_ids[split:])) == " world"


def test_a_character_that_starts_in_the_prompt_is_complete() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = [tokenizer.backend.token_to_id(c) for c in "ðŁİ±"]  # the bytes of one emoji
    assert "".join(stream(tokenizer.detokenizer(prompt_token_ids=token_ids[:2]), token_ids[2:])) == "🎱"


def test_unknown_ids_are_skipped() -> None:
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.decode([10**6, -1, 2**40]) == ""
        assert tokenizer.token_text(10**6) == ""


def test_shown_special_tokens() -> None:
    backend = byte_level_backend()
    backend.add_special_tokens(["<call>", "<end>"])
    tokenizer = Tokenizer(backend, NO_SPECIALS, {})
    call, end = (backend.token_to_id(name) for name in ("<call>", "<end>"))
    ids = [call, *tokenizer.encode("a b"), end, call]
    for shown, text in (((), "a b"), (("<call>", "a"), "<call>a b<call>"), (("a",), "a b")):
        for sizes in ((1,), (3,), (100,)):
            assert "".join(stream(tokenizer.detokenizer(shown_special_tokens=shown), ids, sizes)) == text
    every = tokenizer.detokenizer(shown_special_tokens=("<call>",), skip_special_tokens=False)
    assert "".join(stream(every, ids)) == "<call>a b<end><call>"
