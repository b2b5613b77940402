"""A sequence of tokens that the engine is generating."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from neso.engine.core.draft import Draft
from neso.engine.core.input_embeddings import CacheToken, EmbeddingRows
from neso.engine.core.lockstep import Lockstep
from neso.engine.core.request import EngineRequest

NO_BLOCK = -1
"""In a block table: the block was given back, no token to come sees it."""


class SequenceStatus(Enum):
    """Where a sequence is: queued, among those that every step considers, or done with."""

    WAITING = "waiting"
    RUNNING = "running"
    RELEASED = "released"


@dataclass(slots=True, eq=False)
class Sequence:
    """`token_ids` (prompt and output) is what is known, the first `num_computed_tokens` of them are in the cache.

    The scheduler lets the second number catch up with the length of the first; prefill, decode, prefix hits and
    resuming after preemption are all that. `forks_pending` further sequences of the same request start from this
    one's prompt when it is computed (n > 1). `cache_parent` is the prefix cache's node for the block before the
    next one to be cached. The first `num_window_freed_blocks` places of the table are behind the attention window:
    NO_BLOCK, except for attention sinks. `rank` orders sequences by priority: see `WaitingQueue`.
    `scheduled_ns`: when it first ran, in ns of the monotonic clock. `num_scored_positions`: positions of the prompt
    whose logits have been asked for. `lockstep`: the group that it belongs to as a beam. `adapter_slot`: where the
    runner has its adapter while it runs, -1 for none.

    `embedding_rows`: the vectors that stand in the prompt in place of tokens.

    `draft` is what may come next: the step that reaches the last known token computes it too, and those tokens that
    the model agrees with become known (see `neso.engine.spec_decode`). `slot_copies`: positions (from, to) whose keys
    and values belong elsewhere; the next step begins with moving them.

    While a step runs that samples the next token, a negative number stands for it in `token_ids`: see `StepPlan`.
    """

    id: int
    request: EngineRequest
    arrival: int
    rank: float = 0.0
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    forks_pending: int = 0
    num_cached_tokens: int = 0
    num_cached_blocks: int = 0
    num_window_freed_blocks: int = 0
    cache_parent: Hashable = None
    num_scored_positions: int = 0
    num_preemptions: int = 0
    scheduled_ns: int = 0
    adapter_slot: int = -1
    embedding_rows: EmbeddingRows | None = None
    num_pooled_tokens: int = 0
    lockstep: Lockstep | None = None
    draft: Draft | None = None
    slot_copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def text_token_ids(self) -> list[int]:
        """The prompt without what stands where rows are."""
        ids = self.request.prompt_token_ids
        return ids if self.embedding_rows is None else self.embedding_rows.without_placeholders(ids)

    @property
    def cache_tokens(self) -> list[CacheToken] | list[int]:
        """`token_ids` as the prefix cache knows them: by content where a row stands in place of a token."""
        return (
            self.token_ids
            if self.embedding_rows is None
            else self.embedding_rows.cache_tokens(self.token_ids)
        )

    @property
    def at_limit(self) -> bool:
        """Whether it has all tokens that it may have, though the last one may not be known yet."""
        return self.num_output_tokens >= self.request.max_tokens

    @property
    def order(self) -> tuple[float, int, int]:
        """Sort key: what goes first is kept longest when the cache is short."""
        return (self.rank, self.arrival, self.index)

    @property
    def max_tokens(self) -> int:
        """Tokens of prompt and output at most."""
        return len(self.request.prompt_token_ids) + self.request.max_tokens

    @property
    def waiting(self) -> bool:
        return self.status is SequenceStatus.WAITING

    @property
    def released(self) -> bool:
        return self.status is SequenceStatus.RELEASED

    def accept(self, path: list[int]) -> None:
        """Count tokens of the draft as computed that have become known: their numbers in it, ascending.

        They lie in the slots behind those of the known tokens, in the order of the draft; those of a tree that are
        not in their place are moved by the next step.
        """
        known = self.num_computed_tokens
        self.num_computed_tokens += len(path)
        self.slot_copies = [(known + node, known + place) for place, node in enumerate(path) if node != place]

    @property
    def num_ready_tokens(self) -> int:
        """Tokens that a step may compute now."""
        if self.at_limit:
            return 0
        return self.num_uncomputed_tokens if self.lockstep is None else self.lockstep.num_ready_tokens(self)

    def needs_every_position(self) -> bool:
        """Whether no position may be skipped because its keys and values are known already."""
        pooling = self.request.pooling
        return self.wants_prompt_scores() or (pooling is not None and pooling.pooling != "last")

    def wants_prompt_scores(self) -> bool:
        """Whether logits of positions of the prompt are asked for that nobody has been told yet."""
        return (
            self.request.sampling.needs_prompt_scores
            and self.num_scored_positions < self.num_scorable_positions
        )

    @property
    def num_scorable_positions(self) -> int:
        """All of the prompt, or, for log probabilities of its tokens, those that another follows."""
        return self.num_prompt_tokens - (not self.request.sampling.return_context_logits)
