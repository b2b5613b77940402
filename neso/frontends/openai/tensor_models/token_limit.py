"""`max_tokens` for models that do not know them."""

from __future__ import annotations

from neso.generation import TokenizerLike


class TokenLimit:
    """Cuts the text of one sequence off, as tokens of its model's tokenizer count."""

    def __init__(self, tokenizer: TokenizerLike, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._left = max_tokens

    def add(self, text: str) -> tuple[str, bool]:
        """The text as far as there is room for it, and whether it was cut or leaves no room."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        left, self._left = self._left, max(self._left - len(tokens), 0)
        if len(tokens) <= left:
            return text, not self._left
        kept = self._tokenizer.decode(tokens[:left], skip_special_tokens=False)
        return kept.rstrip("\ufffd"), True
