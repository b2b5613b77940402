"""What the sampler remembers of a sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from neso.generation.sampling_params import SamplingParams


@dataclass(slots=True)
class SamplingState:
    """One sequence's random generator and token counts.

    The generator is the sequence's own, drawn from once a sampled token: with a seed the result depends neither on
    the other sequences of the batch nor on preemption. `output_counts` is kept up as tokens are sampled.
    """

    params: SamplingParams
    generator: np.random.Generator
    suppressed_ids: tuple[int, ...]
    prompt_ids: frozenset[int]
    output_counts: dict[int, int] = field(default_factory=dict)
    num_output_tokens: int = 0

    @classmethod
    def create(
        cls, params: SamplingParams, index: int, prompt_token_ids: list[int], end_token_ids: tuple[int, ...]
    ) -> SamplingState:
        """State for sequence `index` of a request; `end_token_ids` are kept off until `min_tokens` are out."""
        seed = None if params.seed is None else [params.seed % 2**64, index]
        penalized = params.repetition_penalty != 1.0
        return cls(
            params=params,
            generator=np.random.default_rng(seed),
            suppressed_ids=end_token_ids if params.min_tokens else (),
            prompt_ids=frozenset(prompt_token_ids) if penalized else frozenset(),
        )

    def record(self, token_id: int) -> None:
        """Count a token that was sampled."""
        self.num_output_tokens += 1
        self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and filters acts on this sequence's logits."""
        p = self.params
        return bool(
            p.repetition_penalty != 1.0
            or p.presence_penalty
            or p.frequency_penalty
            or p.logit_bias
            or (self.suppressed_ids and self.num_output_tokens < p.min_tokens)
        )
