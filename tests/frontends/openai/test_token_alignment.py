"""Character offsets of tokens in a growing text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neso.frontends.openai.logprobs import TokenAligner, token_bytes
from neso.generation import TokenLogprobs


class Bytes:
    """A tokenizer with a given list of tokens."""

    has_chat_template = False
    chat_template_source = ""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._tokens[token_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    def apply_chat_template(self, messages: Any, **variables: Any) -> str:
        raise NotImplementedError


def places_of(tokens: Sequence[bytes]) -> TokenAligner:
    places = TokenAligner(Bytes(tokens))
    for token_id, token in enumerate(tokens):
        shown = token.decode("utf-8", "replace")
        places.add_token(shown, token_id, TokenLogprobs(token_id, shown, -1.0, 1))
    return places


def offsets(tokens: Sequence[bytes], text: str) -> list[int]:
    places = places_of(tokens)
    places.add_text(text)
    return [token.offset for token in places.take(final=True)]


@pytest.mark.parametrize(
    ("tokens", "text", "expected"),
    [
        ([b"The", b" fox"], "The fox", [0, 3]),
        ([b"a", b"\xe2", b"\x98", b"\x83", b"b"], "a☃b", [0, 1, 1, 1, 2]),
        ([b"\xe2\x98", b"\x83\xe2", b"\x98\x83"], "☃☃", [0, 0, 1]),
        ([b"<s>", b"The", b"</s>"], "The", [0, 0, 3]),  # special tokens, which are not shown
        ([b"a", b"<tool>", b" b"], "a b", [0, 1, 1]),
        ([b" The", b" fox"], "The fox", [0, 3]),  # the first space is omitted
        ([b"hello", b" there"], "hello th", [0, 5]),  # cut within a token
        ([b"hello", b" there", b" you"], "hello", [0, 5, 5]),
        ([b"a", b"b"], "a-b", [0, 2]),  # the text contains characters that are in no token
    ],
)
def test_offsets(tokens: list[bytes], text: str, expected: list[int]) -> None:
    assert offsets(tokens, text) == expected


def test_tokens_stay_pending_until_their_text_is_known() -> None:
    places = places_of([b"ab", b"cd", b"</s>"])
    places.add_text("abc")
    assert [token.text for token in places.take(final=False)] == ["ab"]
    places.add_text("d")
    assert [token.text for token in places.take(final=False)] == ["cd"]
    assert places.take(final=False) == []
    assert [token.offset for token in places.take(final=True)] == [4]


@given(st.text(max_size=20), st.data())
def test_offsets_with_any_split(text: str, data: st.DataObject) -> None:
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    tokens = [encoded[i:j] for i, j in zip([0, *cuts], [*cuts, len(encoded)], strict=True) if j > i]
    places = places_of(tokens)
    found = []
    for character in text:
        places.add_text(character)
        found += places.take(final=False)
    found += places.take(final=True)
    starts = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    begun = [len(encoded[:start].decode("utf-8", "ignore")) for start in starts]
    assert [token.offset for token in found] == begun
    assert places.is_exact


def test_bytes_of_partial_characters() -> None:
    tools = Bytes([b"\xe2\x98"])
    assert token_bytes(tools, "\ufffd", 0) == b"\xe2\x98"
    assert token_bytes(tools, "é", 0) == "é".encode()
