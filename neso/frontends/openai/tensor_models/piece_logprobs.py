"""Log probabilities of tokens that a model tells without saying which tokens they are."""

from __future__ import annotations

from collections.abc import Sequence

from neso.generation import TokenizerLike, TokenLogprobs


class PieceLogprobs:
    """Finds the tokens in the text that comes with their numbers, piece by piece.

    Where the tokenizer makes as many tokens of a piece as there are numbers, they are those; otherwise the piece counts
    as one token, whose log probability is the sum. Numbers without a text wait for it; those of end tokens have none.
    """

    def __init__(self, tokenizer: TokenizerLike | None) -> None:
        self._tokenizer = tokenizer
        self._waiting: list[float] = []

    def add(self, text: str, numbers: Sequence[float]) -> list[TokenLogprobs]:
        """The tokens of the next piece."""
        numbers = [*self._waiting, *numbers]
        if not text or not numbers:
            self._waiting = numbers
            return []
        self._waiting = []
        tokenizer = self._tokenizer
        tokens = tokenizer.encode(text, add_special_tokens=False) if tokenizer is not None else []
        if tokenizer is not None and len(tokens) in (len(numbers), len(numbers) - 1) and len(tokens) > 1:
            texts = [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
            return [
                TokenLogprobs(token, shown, number, 0)
                for token, shown, number in zip(tokens, texts, numbers, strict=False)
            ]
        return [TokenLogprobs(tokens[0] if len(tokens) == 1 else -1, text, sum(numbers), 0)]
