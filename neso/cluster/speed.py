"""Measured speed of a worker: seconds = fixed + slope * size, fitted to what was observed."""

from __future__ import annotations

from dataclasses import dataclass

_MIN_WEIGHT = 5
"""Number of observations, the last ones counted most, before it is used."""


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
    def known(self) -> bool:
        """Whether there are enough observations for a prediction."""
        return self.weight >= _MIN_WEIGHT

    @property
    def mean_size(self) -> float:
        """Mean size of the observations."""
        return self.size / self.weight if self.weight else 0.0

    def seconds_for(self, size: float) -> float:
        """Return the seconds that the fitted line predicts for a size; 0 with too few observations."""
        if not self.known:
            return 0.0
        mean = self.seconds / self.weight
        return max(mean / 4, mean + self.slope * (size - self.mean_size))

    @property
    def slope(self) -> float:
        """Seconds per unit of size. Mean seconds / mean size if the sizes hardly differ; 0 without observations."""
        if not self.size:
            return 0.0
        slope = self._fitted_slope()
        return slope if slope > 0 else self.seconds / self.size

    def _fitted_slope(self) -> float:
        """Return the slope of the line; 0 if the sizes hardly differ."""
        spread = self.weight * self.size_squared - self.size * self.size
        if spread <= 0.05 * self.size * self.size:
            return 0.0
        return (self.weight * self.product - self.size * self.seconds) / spread

    def line(self) -> tuple[float, float] | None:
        """Return the fixed seconds and those per unit of size; None with too few observations.

        Unlike `slope`, this takes all of the time for fixed if the sizes hardly differ.
        """
        if not self.known:
            return None
        slope = max(0.0, self._fitted_slope())
        return max(0.0, self.seconds / self.weight - slope * self.mean_size), slope
