"""Measured speed of a worker: seconds = fixed + slope * size, fitted to what was observed."""

from __future__ import annotations

from dataclasses import dataclass

_MIN_WEIGHT = 5
"""Number of observations, the last ones counted most, before the speeds of workers are compared."""


@dataclass(slots=True)
class StepTime:
    """Least-squares line through (size, seconds). `decay`: weight of earlier observations after a new one.

    A line, because a prompt of few tokens takes as long as a step of the engine: dividing its time by its tokens would
    make a worker with short prompts look slow. The size is the number of prompt tokens, or of decoding sequences.
    """

    decay: float = 0.95
    weight: float = 0.0
    size: float = 0.0
    seconds: float = 0.0
    size_squared: float = 0.0
    product: float = 0.0

    def observe(self, seconds: float, size: float) -> None:
        """Record a measurement."""
        self.weight = self.decay * self.weight + 1
        self.size = self.decay * self.size + size
        self.seconds = self.decay * self.seconds + seconds
        self.size_squared = self.decay * self.size_squared + size * size
        self.product = self.decay * self.product + size * seconds

    @property
    def mean_size(self) -> float:
        """Mean size of the observations."""
        return self.size / self.weight if self.weight else 0.0

    def seconds_for(self, size: float) -> float:
        """Return the seconds that the fitted line predicts for a size; 0 with too few observations."""
        if self.weight < _MIN_WEIGHT:
            return 0.0
        mean = self.seconds / self.weight
        return max(mean / 4, mean + self.slope * (size - self.mean_size))

    @property
    def slope(self) -> float:
        """Seconds per unit of size. Mean seconds / mean size if the sizes hardly differ; 0 without observations."""
        if not self.size:
            return 0.0
        spread = self.weight * self.size_squared - self.size * self.size
        if spread > 0.05 * self.size * self.size:
            slope = (self.weight * self.product - self.size * self.seconds) / spread
            if slope > 0:
                return slope
        return self.seconds / self.size
