"""Proposes draft tokens from earlier text of the sequence (prompt lookup decoding)."""

from __future__ import annotations

from neso.engine.core.sequence import Sequence
from neso.engine.spec_decode.draft import Draft
from neso.engine.spec_decode.speculator import Proposer

MAX_CANDIDATES = 16
"""Maximum number of earlier matches that are compared, latest first."""


class NgramProposer(Proposer):
    """Finds the last tokens of a sequence earlier in it, and proposes the tokens that followed.

    Among the positions that match the last `shortest` tokens, it chooses the longest match, up to `longest` tokens, and
    the latest position in case of a tie.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"prompt_lookup_min ({shortest}) must be at least 1 and at most prompt_lookup_max ({longest})"
            )
        self._longest = longest
        self._shortest = shortest

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        index: NgramIndex | None = sequence.addons.get(self)
        if index is None:
            index = sequence.addons[self] = NgramIndex(self._shortest, self._longest)
        tokens = sequence.token_ids
        start = index.find(tokens)
        if start is None:
            return None
        proposed: list[int] = []
        for place in range(start, start + max_tokens):
            # Past the end of the text, the proposal repeats itself.
            proposed.append(tokens[place] if place < len(tokens) else proposed[place - len(tokens)])
        return Draft(proposed)


class NgramIndex:
    """Positions of all n-grams of `shortest` tokens in a growing sequence."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._indexed = shortest - 1

    def find(self, tokens: list[int]) -> int | None:
        """Return the position after the best match of the last tokens.

        `tokens` must start with the tokens of the previous call.
        """
        size, ends = self._shortest, self._ends
        # Do not index the last n-gram, because it would match itself.
        for end in range(self._indexed + 1, len(tokens)):
            ends.setdefault(tuple(tokens[end - size : end]), []).append(end)
        self._indexed = max(self._indexed, len(tokens) - 1)
        places = ends.get(tuple(tokens[-size:])) if len(tokens) >= size else None
        if places is None:
            return None
        best, best_length = None, 0
        for place in places[: -MAX_CANDIDATES - 1 : -1]:
            length = self._common(tokens, place)
            if length > best_length:
                best, best_length = place, length
                if length >= self._longest:
                    break
        return best

    def _common(self, tokens: list[int], place: int) -> int:
        """Return the number of tokens before `place` that equal the last tokens, at most `longest`."""
        length = self._shortest
        while (
            length < min(self._longest, place)
            and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]
        ):
            length += 1
        return length
