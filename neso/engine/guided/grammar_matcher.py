"""The grammar state of one sequence, based on llguidance's matchers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from neso.engine.guided.grammar import MatcherError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MAX_LEXER_STATES = 50_000
"""Maximum number of lexer states of a sequence."""
NOTHING_FITS = "no text that this model can write fits it"
MAX_MESSAGE_LENGTH = 500


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> tuple[LLMatcher, str]:
    """Return a matcher in its initial state, and the error in its grammar; "" if there is none."""
    from llguidance import LLMatcher, LLParserLimits

    # The library's own limits bound most grammars. Each sequence has its own lexer states, 1 to 2 kB each.
    limits = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        # The first mask creates the first lexer states, which are then shared by copies.
        matcher.compute_bitmask()
        if matcher.is_stopped() and not matcher.is_error():
            return matcher, NOTHING_FITS
    return matcher, error_of(matcher)


def error_of(matcher: LLMatcher) -> str:
    """Return the error message of a matcher; "" if there is none."""
    if not matcher.is_error():
        return ""
    message: str = matcher.get_error().replace("<non-verbose/>", "").strip()
    if not message or message.startswith("NoExtensionBias"):
        return NOTHING_FITS
    return message[:MAX_MESSAGE_LENGTH]


MaskRows = npt.NDArray[np.int32]
"""Bit t % 32 of word t // 32 is set if token t is allowed; int32[rows, mask_width]."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar over a vocabulary. Its matcher stays in the initial state: sequences use copies."""

    matcher: LLMatcher
    vocab_size: int

    def start(self, end_token_ids: Iterable[int]) -> GrammarMatcher:
        """Create a matcher for a new sequence; `end_token_ids` are allowed when its text is complete."""
        return GrammarMatcher(self.matcher.deep_copy(), self.vocab_size, end_token_ids)


class GrammarMatcher:
    """The grammar state after the tokens of one sequence.

    For speculative decoding, `fill_after` computes the masks along a draft, and `count_valid` the number of valid draft
    tokens; both leave the state unchanged. `rollback` removes tokens.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        self._matcher = matcher
        self.mask_width = vocab_size // 32 + 1
        """Number of 32-bit words of a mask: one bit per token, and one for the end of the grammar."""
        # A tokenizer may define an end token for which the model has no logits.
        self._end_token_ids = tuple(token for token in end_token_ids if token < vocab_size)
        self._end_words = [token // 32 for token in self._end_token_ids]
        self._end_bits = [_BITS[token % 32] for token in self._end_token_ids]
        self._grammar_end = vocab_size // 32, _BITS[vocab_size % 32]

    @property
    def complete(self) -> bool:
        """Whether the text is complete and nothing can follow it."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def fill(self, masks: MaskRows, row: int) -> None:
        """Write the mask of the next token to a row of int32[rows, mask_width], C order.

        If the text is complete, tokens that end the sequence are allowed. Raises `MatcherError`.
        """
        words = masks[row]
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise MatcherError(error_of(self._matcher))
        word, bit = self._grammar_end
        if words[word] & bit:
            words[word] &= ~bit
            for end_word, end_bit in zip(self._end_words, self._end_bits, strict=True):
                words[end_word] |= end_bit
            if not words.any():
                raise MatcherError("nothing can follow, and the request has no token that ends it")

    def advance(self, token_id: int) -> bool:
        """Consume the next token, which does not end the sequence; returns `complete`. Raises `MatcherError`."""
        if not self._matcher.consume_token(token_id):
            raise MatcherError(f"token {token_id} does not fit the grammar: {error_of(self._matcher)}")
        return self.complete

    def count_valid(self, draft: list[int]) -> int:
        """Return the number of draft tokens that fit the grammar, up to one that ends the sequence."""
        ends = (i for i, token in enumerate(draft) if token in self._end_token_ids)
        valid: int = self._matcher.validate_tokens(draft[: next(ends, len(draft))])
        return valid

    def fill_after(self, draft: list[int], masks: MaskRows, row: int) -> int:
        """Write the masks before each token of a draft, and after the last one, to the rows starting at `row`.

        Returns the number of masks written: up to the first token that does not fit or that ends the text, so at least
        one and at most `len(draft)` + 1. Raises `MatcherError`.
        """
        self.fill(masks, row)
        taken = 0
        rows = 1
        try:
            for token in draft[: self.count_valid(draft)]:
                complete = self.advance(token)
                taken += 1
                if complete:
                    break
                self.fill(masks, row + rows)
                rows += 1
        finally:
            self.rollback(taken)
        return rows

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens. Raises `MatcherError`."""
        if count and not self._matcher.rollback(count):
            raise MatcherError(error_of(self._matcher))


_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)
