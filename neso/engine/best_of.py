"""The best of several sampled sequences."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from neso.generation import Completion


@dataclass(slots=True)
class BestOf:
    """Gathers what the sequences of a request give until all are finished; `best` are then the answers.

    The best are those with the highest log probability a token, as in OpenAI's `best_of`.
    """

    n: int
    _deltas: dict[int, list[Completion]] = field(default_factory=dict)

    def add(self, deltas: list[Completion]) -> None:
        for delta in deltas:
            self._deltas.setdefault(delta.index, []).append(delta)

    def best(self) -> list[Completion]:
        """One delta for each of the n best, with all that it has, the best first."""
        whole = [Completion.joined(self._deltas[index]) for index in sorted(self._deltas)]
        whole.sort(key=_mean_logprob, reverse=True)
        return [replace(delta, index=index) for index, delta in enumerate(whole[: self.n])]


def _mean_logprob(delta: Completion) -> float:
    return (delta.cumulative_logprob or 0.0) / max(1, len(delta.token_ids))
