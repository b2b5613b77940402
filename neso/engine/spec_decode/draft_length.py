"""Choice of the number of draft tokens that maximizes throughput."""

from __future__ import annotations

from collections.abc import Sequence

_SMOOTHING = 0.05
_FORGET = 0.98
"""Decay factor of older steps in the cost measurement."""
PROBE_EVERY = 128
"""If drafts do not pay off: number of steps until one draft token is proposed again for a few steps, because the text
may have become more predictable.
"""
_PROBE_STEPS = 4
_VARY_EVERY = 24
"""If drafts pay off: number of steps until a step without drafts (to measure their cost) or with longer drafts."""
_STEPS_TO_LEARN = 16


class DraftLength:
    """Chooses the draft length that gives the most tokens per second.

    It continuously measures how often the token at each draft position is accepted given that the previous ones are,
    and the cost of a step as a constant plus a cost per row. With few sequences, a step is bound by reading the weights
    and drafts are almost free. With many sequences, each row costs time, and rejected drafts waste it.

    `longest` is the initial length; `fixed` keeps it. `rows_of[length - 1]`: number of tokens in a draft of that
    length, which is larger for trees.
    """

    def __init__(self, longest: int, *, fixed: bool = False, rows_of: Sequence[int] | None = None) -> None:
        self.longest = longest
        self._fixed = fixed
        self._rows_of = rows_of or range(1, longest + 1)
        # Start optimistic: the acceptance rate of lengths that are never tried cannot be measured.
        self._accepted = [0.8] * longest
        self._cost = LineFit()
        self._propose_seconds = 0.0
        self._steps = 0
        self._probing_until = _STEPS_TO_LEARN

    def choose(self, num_decoding: int) -> int:
        """Return the number of draft tokens for each of `num_decoding` sequences; 0 for no drafts."""
        if self._fixed or not num_decoding:
            return self.longest
        self._steps += 1
        if self._steps <= _STEPS_TO_LEARN:
            return 0 if self._steps % 4 == 0 else self.longest
        if self._steps <= self._probing_until:
            return 1
        best = self._best(num_decoding)
        if best and self._steps % _VARY_EVERY == 0:
            return 0 if self._steps % (2 * _VARY_EVERY) == 0 else min(best + 1, self.longest)
        if best:
            return best
        if self._steps >= self._probing_until + PROBE_EVERY:
            self._probing_until = self._steps + _PROBE_STEPS
        return 0

    def _best(self, num_decoding: int) -> int:
        best, best_rate = 0, 1 / self._cost.predict(num_decoding)
        tokens = reached = 1.0
        for length, accepted in enumerate(self._accepted, 1):
            reached *= accepted
            tokens += reached
            rows = num_decoding * (1 + self._rows_of[length - 1])
            seconds = self._cost.predict(rows) + length * self._propose_seconds
            rate = tokens / seconds
            if rate > best_rate:
                best, best_rate = length, rate
        return best

    def observe_draft(self, num_tokens: int, num_accepted: int) -> None:
        """Record the result of a draft. Tokens after the first rejected one give no information."""
        for place in range(min(num_tokens, num_accepted + 1, self.longest)):
            hit = float(place < num_accepted)
            self._accepted[place] += _SMOOTHING * (hit - self._accepted[place])

    def observe_proposal(self, length: int, seconds: float) -> None:
        """Record the seconds taken to propose `length` tokens for all sequences together."""
        self._propose_seconds += _SMOOTHING * (seconds / length - self._propose_seconds)

    def observe_step(self, num_decoding: int, num_drafts: int, seconds: float) -> None:
        """Record a step without prompts: number of decoding sequences and of draft tokens, and the duration."""
        if num_decoding:
            self._cost.add(num_decoding + num_drafts, seconds)


class LineFit:
    """Duration of a step in seconds as a function of its rows: linear regression over recent measurements."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Add a measurement; earlier ones decay."""
        self._weight = self._weight * _FORGET + 1
        self._rows = self._rows * _FORGET + rows
        self._seconds = self._seconds * _FORGET + seconds
        self._squares = self._squares * _FORGET + rows * rows
        self._products = self._products * _FORGET + rows * seconds

    def predict(self, rows: int) -> float:
        """Return the expected seconds, greater than 0."""
        if not self._weight:
            return 1.0
        mean_rows, mean = self._rows / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean_rows * mean_rows
        # With a single number of rows the slope cannot be estimated; assume that rows are free.
        slope = 0.0
        if spread > 1e-9 * max(1.0, mean_rows * mean_rows):
            slope = max(0.0, (self._products / self._weight - mean_rows * mean) / spread)
        constant = max(mean - slope * mean_rows, 0.0)
        return max(constant + slope * rows, 1e-9)
