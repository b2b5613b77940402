"""Bad words as the tokens that would spell them."""

from __future__ import annotations

from collections.abc import Iterable

from neso.engine.text.no_tokenizer import NoTokenizer
from neso.engine.text.tokenizer import Tokenizer


def token_sequences(
    words: Iterable[str | tuple[int, ...]], tokenizer: Tokenizer | NoTokenizer
) -> list[tuple[int, ...]]:
    """Token sequences as they are; texts as they are written at the start of a line and behind a space."""
    words = list(words)
    texts = [form for word in words if isinstance(word, str) for form in (word.lstrip(), " " + word.lstrip())]
    given = [word for word in words if not isinstance(word, str)]
    spelled = map(tuple, tokenizer.encode_batch(texts, add_special_tokens=False))
    return [ids for ids in dict.fromkeys([*given, *spelled]) if ids]
