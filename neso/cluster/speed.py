"""Measured speed of a worker's prefills: seconds = fixed + per token, fitted to what was observed."""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.95
"""Weight of earlier observations after a new one."""
_MIN_WEIGHT = 5
"""Number of observations, the last ones counted most, before the speeds of workers are compared."""


@dataclass(slots=True)
class PrefillSpeed:
    """Least-squares line through (tokens, seconds); older observations count less and less.

    A line, because a prompt of few tokens takes as long as a step of the engine: dividing its time by its tokens would
    make a worker with short prompts look slow.
    """

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    product: float = 0.0

    def observe(self, seconds: float, tokens: int) -> None:
        """Record that `tokens` prompt tokens, with those that were in front, have taken `seconds`."""
        self.weight = _DECAY * self.weight + 1
        self.tokens = _DECAY * self.tokens + tokens
        self.seconds = _DECAY * self.seconds + seconds
        self.tokens_squared = _DECAY * self.tokens_squared + tokens * tokens
        self.product = _DECAY * self.product + tokens * seconds

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens of the observations."""
        return self.tokens / self.weight if self.weight else 0.0

    def seconds_for(self, tokens: float) -> float:
        """Return the time of a prompt of this length by the line; 0 with too few observations."""
        if self.weight < _MIN_WEIGHT:
            return 0.0
        mean = self.seconds / self.weight
        return max(mean / 4, mean + self.seconds_per_token * (tokens - self.mean_tokens))

    @property
    def seconds_per_token(self) -> float:
        """Slope of the line; the mean time of a token if all prompts had similar lengths; 0: nothing was observed."""
        if not self.tokens:
            return 0.0
        spread = self.weight * self.tokens_squared - self.tokens * self.tokens
        if spread > 0.05 * self.tokens * self.tokens:
            slope = (self.weight * self.product - self.tokens * self.seconds) / spread
            if slope > 0:
                return slope
        return self.seconds / self.tokens
