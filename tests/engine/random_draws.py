"""Random sampling parameters, and the allowed difference between other samplers and numpy."""

from __future__ import annotations

import numpy as np

from neso.engine.sampling.token_sampling import SamplingBatch, exponentials, filter_weights


def random_draws(rng: np.random.Generator, rows: int, **fixed: float) -> SamplingBatch:
    """Return random filters and temperatures; `fixed` values override them."""

    def values(name: str, options: list[float], dtype: type) -> np.ndarray:
        return rng.choice([fixed[name]] if name in fixed else options, rows).astype(dtype)

    return SamplingBatch(
        temperature=values("temperature", [0.0, 0.3, 1.0, 2.0], np.float32),
        top_k=values("top_k", [0, 1, 2, 7, 50, 10_000], np.int32),
        top_p=values("top_p", [0.05, 0.5, 0.9, 0.999, 1.0], np.float32),
        min_p=values("min_p", [0.0, 0.01, 0.5], np.float32),
        uniforms=rng.random(rows),
    )


def assert_neighbours(
    found: np.ndarray, expected: np.ndarray, logits: np.ndarray, draws: SamplingBatch, breadth: float
) -> None:
    """Allow rounding at the edge of a draw: a different token must be adjacent among the remaining ones.

    `breadth`: allowed shift of the uniform random number.
    """
    for row in np.flatnonzero(found != expected):
        one = draws.rows(np.array([row]))
        weights = exponentials(logits[[row]], one.temperature)
        # Both tokens lie within a small interval around the random number and the filters.
        kept = filter_weights(
            weights, one.top_k, np.minimum(one.top_p + 1e-4, 1), one.min_p * np.float32(0.999)
        )[0]
        cumulative = kept.astype(np.float64).cumsum() / kept.sum(dtype=np.float64)
        low, high = np.searchsorted(cumulative, [one.uniforms[0] - breadth, one.uniforms[0] + breadth])
        assert low <= found[row] <= high
