"""Chooses the number of draft tokens that maximizes throughput."""

from __future__ import annotations

from collections.abc import Sequence

_SMOOTHING = 0.05
_FORGET = 0.98
"""Decay of earlier steps in the measurement of costs."""
PROBE_EVERY = 128
"""If drafts do not pay, steps until one token is proposed again for a few steps, because texts change."""
_PROBE_STEPS = 4
_VARY_EVERY = 24
"""If drafts pay, steps until one without drafts (which measures their cost) or with longer ones."""
_STEPS_TO_LEARN = 16


class DraftLength:
    """Chooses the length of drafts that gives the most tokens per second.

    Measured continuously: how often the token at each position of a draft is accepted if those before it are, and the
    cost of a step as a constant plus a cost per row. With few sequences, a step is bound by reading the weights and
    drafts are almost free; with many, each row costs time, and rejected drafts waste it.

    `longest` is the initial length; `fixed` keeps it. `rows_of[length - 1]`: tokens of a draft of that length, which
    are more in a tree.
    """

    def __init__(self, longest: int, *, fixed: bool = False, rows_of: Sequence[int] | None = None) -> None:
        self.longest = longest
        self._fixed = fixed
        self._rows_of = rows_of or range(1, longest + 1)
        # Optimistic: what is never tried is never learned.
        self._accepted = [0.8] * longest
        self._cost = LineFit()
        self._propose_seconds = 0.0
        self._steps = 0
        self._probing_until = _STEPS_TO_LEARN

    def choose(self, num_decoding: int) -> int:
        """Draft tokens for each of `num_decoding` sequences; 0 for none."""
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
        best, best_rate = 0, 1 / self._cost.at(num_decoding)
        tokens = reached = 1.0
        for length, accepted in enumerate(self._accepted, 1):
            reached *= accepted
            tokens += reached
            rows = num_decoding * (1 + self._rows_of[length - 1])
            seconds = self._cost.at(rows) + length * self._propose_seconds
            rate = tokens / seconds
            if rate > best_rate:
                best, best_rate = length, rate
        return best

    def observe_draft(self, num_tokens: int, num_accepted: int) -> None:
        """Record a draft. Tokens after the first rejected one give no information."""
        for place in range(min(num_tokens, num_accepted + 1, self.longest)):
            hit = float(place < num_accepted)
            self._accepted[place] += _SMOOTHING * (hit - self._accepted[place])

    def observe_proposal(self, length: int, seconds: float) -> None:
        """Record how long proposing `length` tokens took, for all sequences together."""
        self._propose_seconds += _SMOOTHING * (seconds / length - self._propose_seconds)

    def observe_step(self, num_decoding: int, num_drafts: int, seconds: float) -> None:
        """Record a step without prompts: sequences that decoded, draft tokens, and its duration."""
        if num_decoding:
            self._cost.add(num_decoding + num_drafts, seconds)


class LineFit:
    """Seconds of a step by its rows: linear regression over recent measurements."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Add a measurement; earlier ones decay."""
        self._weight = self._weight * _FORGET + 1
        self._rows = self._rows * _FORGET + rows
        self._seconds = self._seconds * _FORGET + seconds
        self._squares = self._squares * _FORGET + rows * rows
        self._products = self._products * _FORGET + rows * seconds

    def at(self, rows: int) -> float:
        """Expected seconds, more than 0."""
        if not self._weight:
            return 1.0
        mean_rows, mean = self._rows / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean_rows * mean_rows
        # With one number of rows only there is no slope to see: what does not grow is what decoding is at its best.
        slope = 0.0
        if spread > 1e-9 * max(1.0, mean_rows * mean_rows):
            slope = max(0.0, (self._products / self._weight - mean_rows * mean) / spread)
        constant = max(mean - slope * mean_rows, 0.0)
        return max(constant + slope * rows, 1e-9)
