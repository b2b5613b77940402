"""Vocabulary of a model for llguidance."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec
from llguidance import LLTokenizer

if TYPE_CHECKING:
    from llguidance import TokenizerWrapper

    from neso.engine.text.tokenizer import Tokenizer


class TokenTable(msgspec.Struct, frozen=True):
    """Bytes of every token by id; empty for tokens that are not text."""

    pieces: list[bytes]
    special_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> TokenTable:
        """Create the table for a model with logits of width `vocab_size`, which may differ from the tokenizer's size.

        The bytes are those written by the detokenizer, so the grammar matches the text of the output.
        """
        special = [i for i in sorted(tokenizer.special_ids) if i < vocab_size]
        return cls([tokenizer.token_bytes(i) or b"" for i in range(vocab_size)], special)

    def special_tokens(self) -> dict[str, int]:
        """Return the ids of the special tokens by name."""
        return {self.pieces[i].decode("utf-8", "replace"): i for i in self.special_ids}

    def ll_tokenizer(self) -> LLTokenizer:
        """Create llguidance's tokenizer: the vocabulary and, after it, one more token for the end of a grammar.

        That token has no row in the logits. Each request defines which tokens end a sequence; see `GrammarMatcher`.
        """
        wrapper = _Wrapper(self)
        # The wrapper provides the attributes that the library reads; the library's own class only wraps such an object.
        return LLTokenizer(
            cast("TokenizerWrapper", wrapper), n_vocab=len(wrapper.tokens), eos_token=wrapper.eos_token_id
        )


class _Wrapper:
    """The attributes that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable) -> None:
        self.eos_token_id = len(table.pieces)
        self.tokens = [*table.pieces, b"<end of the grammar>"]
        self.special_token_ids = [*table.special_ids, self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize a text; used only if a grammar forces text, which `NO_FORCING` prevents."""
        return []
