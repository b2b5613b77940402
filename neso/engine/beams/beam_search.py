"""State of one beam search: live beams, finished hypotheses, and candidate scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from neso.engine.core.request import PositionLogprobs
from neso.engine.core.sequence import Sequence, finish_reason
from neso.engine.sampling.adjustments import adjust
from neso.engine.sampling.logprobs import Indices, best_candidates, log_normalizer, position_logprobs
from neso.engine.sampling.state import SamplingState
from neso.generation.output import FinishReason
from neso.generation.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class PathStep:
    """A token of a beam, linked to the previous one; beams share the steps of their common prefix.

    `logits`: bytes of the logits float32[V] from which the token was chosen, if requested.
    """

    previous: PathStep | None
    token_id: int
    logprobs: PositionLogprobs | None
    logits: bytes

    def steps(self) -> list[PathStep]:
        """Return the steps, first token first."""
        found: list[PathStep] = []
        step: PathStep | None = self
        while step is not None:
            found.append(step)
            step = step.previous
        return found[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A finished sequence. `score`: sum of its log probabilities, divided by length ** length_penalty."""

    path: PathStep
    reason: FinishReason
    cumulative_logprob: float
    score: float


@dataclass(slots=True)
class Hypotheses:
    """The best finished sequences, at most `params.beam_width`, best first."""

    params: SamplingParams
    max_tokens: int
    best: list[Hypothesis] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.best) == self.params.beam_width

    def score(self, cumulative_logprob: float, length: int) -> float:
        penalty: float = length**self.params.length_penalty
        return cumulative_logprob / penalty

    def add(self, path: PathStep, reason: FinishReason, cumulative_logprob: float, length: int) -> None:
        """Add a sequence of `length` tokens if it is among the best."""
        score = self.score(cumulative_logprob, length)
        self.best.append(Hypothesis(path, reason, cumulative_logprob, score))
        # The sort is stable, so earlier hypotheses win ties.
        self.best.sort(key=lambda hypothesis: -hypothesis.score)
        del self.best[self.params.beam_width :]

    def is_done(self, best_live: float, length: int) -> bool:
        """Whether no better hypothesis is expected.

        The best live beam has `length` tokens and log probability `best_live`. Unless early_stopping is "never", a beam
        is expected to end with its current score.
        """
        if not self.full:
            return False
        if self.params.early_stopping is True:
            return True
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.max_tokens
        return self.score(best_live, length) <= self.best[-1].score


FloatRows = npt.NDArray[np.float32]


class InvalidLogits(Exception):
    """The model produced NaN logits."""


@dataclass(frozen=True, slots=True, eq=False)
class BeamScores:
    """Scores of continuations: ((v - highest[b]) - log_mass[b]) + sums[b] for value v of beam b, as in transformers.

    - values: float32[B, V], logits; log probabilities for beams with penalties
    - highest, log_mass: float32[B], of the logits; 0 if values are log probabilities
    - sums: float32[B], log probabilities of the beams
    """

    values: FloatRows
    highest: FloatRows
    log_mass: FloatRows
    sums: FloatRows

    @classmethod
    def of(cls, logits: FloatRows, sums: list[float], states: list[SamplingState]) -> BeamScores:
        """Prepare the scores for the logits of a step. Raises `InvalidLogits`."""
        highest, log_mass = np.empty((2, len(logits)), np.float32)
        buffer = np.empty_like(logits[0])
        for i, row in enumerate(logits):
            highest[i], log_mass[i] = log_normalizer(row, buffer)
        if np.isnan(log_mass).any():
            raise InvalidLogits
        changed = [i for i, state in enumerate(states) if state.changes_logits]
        values = logits.copy() if changed else logits
        for i in changed:
            values[i] -= highest[i]
            values[i] -= log_mass[i]
            adjust(values[i], states[i])
        highest[changed] = log_mass[changed] = 0
        return cls(values, highest, log_mass, np.array(sums, np.float32))

    def __call__(self, values: FloatRows, beams: Indices) -> FloatRows:
        """Return the scores of values float32[n, ...] of beams[n]."""
        scores: FloatRows = (values - self.highest[beams, None]) - self.log_mass[beams, None]
        scores += self.sums[beams, None]
        return scores


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A live beam: prompt and output tokens, and the sum of the log probabilities of the output."""

    token_ids: list[int]
    cumulative_logprob: float
    state: SamplingState
    path: PathStep | None = None


class _Candidate(NamedTuple):
    parent: int
    token_id: int
    cumulative_logprob: float


class BeamSearch:
    """`beams`: the live beams, best first; at most `beam_width`, fewer if fewer tokens are allowed."""

    def __init__(self, sequence: Sequence) -> None:
        self.request = request = sequence.request
        self.hypotheses = Hypotheses(request.sampling, request.max_tokens)
        state = SamplingState.create(request, sequence.text_token_ids)
        self.beams = [Beam(request.prompt_token_ids, 0.0, state)]
        # Enough candidates for `beam_width` beams to continue, even if all others end.
        ending = {*request.end_token_ids, *(word[-1] for word in request.sampling.stop_words)}
        self._num_candidates = request.sampling.beam_width * max(2, 1 + len(ending))

    @property
    def num_output_tokens(self) -> int:
        return len(self.beams[0].token_ids) - len(self.request.prompt_token_ids)

    def advance(self, logits: FloatRows) -> list[int]:
        """Choose the next beams from the logits float32[B, V] of the current ones.

        Returns the parent of each new beam; an empty list if the search has ended. Raises `InvalidLogits`.
        """
        width = self.request.sampling.beam_width
        continuing: list[_Candidate] = []
        length = self.num_output_tokens + 1
        for rank, candidate in enumerate(self._candidates(logits)):
            known = self.beams[candidate.parent].token_ids
            reason = finish_reason(self.request, known, candidate.token_id)
            if reason is None:
                continuing.append(candidate)
            elif rank < width:
                # Further candidates are only needed so that enough beams can continue.
                self.hypotheses.add(
                    self._path(candidate, logits), reason, candidate.cumulative_logprob, length
                )
        del continuing[width:]
        if not continuing or self.hypotheses.is_done(continuing[0].cumulative_logprob, length):
            return []
        self.beams = [self._extended(candidate, logits) for candidate in continuing]
        return [candidate.parent for candidate in continuing]

    def _candidates(self, logits: FloatRows) -> list[_Candidate]:
        """Return the best continuations, best first."""
        params = self.request.sampling
        if not params.greedy and params.temperature != 1.0:
            logits = logits * np.float32(1 / params.temperature)
        sums = [beam.cumulative_logprob for beam in self.beams]
        scores = BeamScores.of(logits, sums, [beam.state for beam in self.beams])
        rate = np.float32(params.beam_search_diversity_rate)

        def key(values: FloatRows, beams: Indices) -> FloatRows:
            return scores(values, beams) + rate * beams[:, None].astype(np.float32)

        parents, tokens = best_candidates(scores.values, key if rate else scores, self._num_candidates)
        totals = scores(scores.values[parents, tokens][:, None], parents)[:, 0]
        return list(map(_Candidate, parents.tolist(), tokens.tolist(), totals.tolist()))

    def _extended(self, candidate: _Candidate, logits: FloatRows) -> Beam:
        parent = self.beams[candidate.parent]
        return Beam(
            token_ids=[*parent.token_ids, candidate.token_id],
            cumulative_logprob=candidate.cumulative_logprob,
            state=parent.state.fork(candidate.token_id),
            path=self._path(candidate, logits),
        )

    def _path(self, candidate: _Candidate, logits: FloatRows) -> PathStep:
        params = self.request.sampling
        row = logits[candidate.parent]
        logprobs = None
        if params.logprobs is not None:
            (logprobs,) = position_logprobs(row[None], [candidate.token_id], params.logprobs)
        return PathStep(
            previous=self.beams[candidate.parent].path,
            token_id=candidate.token_id,
            logprobs=logprobs,
            logits=row.tobytes() if params.return_generation_logits else b"",
        )
