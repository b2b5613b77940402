"""What the sampler remembers of a sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from neso.engine.core.request import EngineRequest
from neso.engine.sampling.token_bans import TokenBans
from neso.generation.sampling_params import SamplingParams

_UNIFORMS_AT_ONCE = 16


@dataclass(slots=True)
class SamplingState:
    """One sequence's random numbers and token counts.

    The random numbers are the sequence's own, one a sampled token: with a seed the result depends neither on the
    other sequences of the batch nor on preemption. `output_counts` is kept where penalties need it. `top_p` is that
    of the next token.
    `returned` are random numbers that were taken for tokens which did not come to be: the next ones get them.
    """

    params: SamplingParams
    uniforms: Iterator[float]
    suppressed_ids: tuple[int, ...]
    prompt_ids: frozenset[int]
    dense_bias: npt.NDArray[np.float32] | None
    bans: TokenBans | None
    counts_tokens: bool
    follows_tokens: bool
    changes_always: bool
    wants_scores: bool
    top_p: float
    output_counts: dict[int, int] = field(default_factory=dict)
    num_output_tokens: int = 0
    returned: deque[float] = field(default_factory=deque)

    @classmethod
    def create(cls, request: EngineRequest, prompt: list[int], index: int = 0) -> SamplingState:
        """State for sequence `index` of a request, whose prompt has the tokens `prompt` beside what may be vectors.

        What ends the sequence is kept off until `min_tokens` are out.
        """
        params = request.sampling
        penalized = params.repetition_penalty != 1.0
        counts_tokens = bool(penalized or params.presence_penalty or params.frequency_penalty)
        bans = TokenBans.create(
            request.bad_words, params.allowed_token_ids, params.no_repeat_ngram_size, prompt
        )
        bias = np.frombuffer(params.embedding_bias, np.float32) if params.embedding_bias else None
        return cls(
            params=params,
            uniforms=_uniforms(params.seed, index),
            suppressed_ids=tuple(request.end_token_ids) if params.min_tokens else (),
            prompt_ids=frozenset(prompt) if penalized else frozenset(),
            dense_bias=bias,
            bans=bans,
            counts_tokens=counts_tokens,
            follows_tokens=counts_tokens or bans is not None or params.top_p_decay < 1,
            changes_always=bool(counts_tokens or params.logit_bias or bias is not None or bans is not None),
            wants_scores=params.needs_token_scores,
            top_p=params.top_p,
        )

    def uniform(self) -> float:
        """The next random number, in [0, 1)."""
        return self.returned.popleft() if self.returned else next(self.uniforms)

    def give_back(self, uniforms: list[float]) -> None:
        """Put back random numbers that were taken and not used: they are the next ones."""
        self.returned.extendleft(reversed(uniforms))

    def after(self, token_ids: Sequence[int], uniform: float) -> SamplingState:
        """A copy as it will be when these tokens have been sampled; `uniform` is its next random number."""
        child = self._copy()
        child.returned = deque((uniform,))
        for token_id in token_ids:
            child.record(token_id)
        return child

    def record(self, token_id: int) -> None:
        """Count a token that was sampled."""
        self.num_output_tokens += 1
        if self.follows_tokens:
            self._follow(token_id)

    def _follow(self, token_id: int) -> None:
        if self.counts_tokens:
            self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1
        if self.bans is not None:
            self.bans.record(token_id)
        if self.params.top_p_decay < 1:
            self._decay_top_p(token_id)

    def fork(self, token_id: int) -> SamplingState:
        """The state of a sequence that goes on from this one with a token of its own."""
        child = self._copy()
        child.record(token_id)
        return child

    def _copy(self) -> SamplingState:
        return replace(
            self,
            output_counts=dict(self.output_counts),
            bans=None if self.bans is None else self.bans.copy(),
            returned=deque(self.returned),
        )

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and filters acts on this sequence's logits."""
        return self.changes_always or (
            bool(self.suppressed_ids) and self.num_output_tokens < self.params.min_tokens
        )

    def _decay_top_p(self, token_id: int) -> None:
        params = self.params
        if token_id == params.top_p_reset_ids:
            self.top_p = params.top_p
        else:
            self.top_p = max(self.top_p * params.top_p_decay, params.top_p_min)


def _uniforms(seed: int | None, index: int) -> Iterator[float]:
    """Made at the first draw: greedy sequences need none."""
    generator = np.random.default_rng(None if seed is None else [seed % 2**64, index])
    while True:
        yield from generator.random(_UNIFORMS_AT_ONCE).tolist()
