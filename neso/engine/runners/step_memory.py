"""Memory that the largest step of the scheduler needs besides weights and KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neso.engine.core.step_plan import StepPlan
from neso.engine.sampling.token_sampling import SamplingBatch
from neso.engine.specs.decoder_spec import DecoderSpec

_FLOAT_BYTES = 4


class StepTooLarge(Exception):
    """The memory of the device does not suffice for the largest step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The largest step that the scheduler makes.

    - num_tokens: new tokens of all sequences, at most `chunk` of each
    - num_sequences: sequences, each with at least one new token
    - num_rows: rows of logits, from all of which a token is sampled; more than sequences if there are draft tokens
    - max_model_len: maximum length of a sequence; block_size: tokens of a KV cache block
    """

    num_tokens: int
    num_sequences: int
    num_rows: int
    chunk: int
    max_model_len: int
    block_size: int

    def plan(self) -> StepPlan:
        """Return a plan of this size. All its tokens are in block 0, so any cache will do."""
        lengths = np.ones(min(self.num_sequences, self.num_tokens), np.int32)
        rest = self.num_tokens - len(lengths)
        longest = min(self.chunk, self.max_model_len)
        for sequence in range(len(lengths)):
            added = min(rest, longest - 1)
            lengths[sequence] += added
            rest -= added
        ends = np.cumsum(lengths, dtype=np.int32)
        table_length = -(-self.max_model_len // self.block_size)
        return StepPlan(
            step=0,
            sequence_ids=np.arange(len(lengths), dtype=np.int32),
            token_ids=np.zeros(ends[-1], np.int32),
            query_start=np.concatenate([np.zeros(1, np.int32), ends]),
            num_computed=np.zeros(len(lengths), np.int32),
            block_tables=np.zeros((len(lengths), table_length), np.int32),
            block_copies=np.empty((0, 2), np.int32),
            logits_rows=np.resize(ends - 1, self.num_rows),
        )

    def draws(self) -> SamplingBatch:
        """Return the sampling of all rows with top-p."""
        return SamplingBatch.of([(1.0, 0, 0.9, 0.0, 0.5)] * self.num_rows)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that are needed besides weights and KV cache.

    - step: activations, logits and sampling of the largest step; graphs: CUDA graphs
    - measured: by running the step; otherwise estimated from the shape of the model
    """

    step: int
    graphs: int = 0
    measured: bool = False

    @property
    def total(self) -> int:
        return self.step + self.graphs

    def beside(self, other: StepMemory) -> StepMemory:
        """Return the need of two models whose steps take turns."""
        return StepMemory(
            max(self.step, other.step), self.graphs + other.graphs, self.measured or other.measured
        )


def logits_memory(size: StepSize, vocab_size: int) -> int:
    """Return the bytes of the logits float32 and of a copy of them for sampling."""
    return 2 * size.num_rows * vocab_size * _FLOAT_BYTES


def activations_memory(size: StepSize, spec: DecoderSpec) -> int:
    """Return the bytes of the activations in one layer, in float32; layers reuse the memory."""
    heads = spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)  # queries, keys, values, attention
    widths = [spec.intermediate_size]
    if spec.experts is not None:
        experts = spec.experts
        widths.append(experts.top_k * experts.intermediate_size + (experts.shared_size or 0))
    mlp = (3 if spec.gated else 2) * max(widths)
    per_token = 3 * spec.hidden_size + heads + mlp
    return size.num_tokens * per_token * _FLOAT_BYTES
