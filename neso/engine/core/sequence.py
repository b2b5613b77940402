"""A sequence of tokens that the engine is generating."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from neso.engine.core.draft import Draft
from neso.engine.core.request import EngineRequest
from neso.generation.output import FinishReason

if TYPE_CHECKING:
    from neso.engine.core.prefix_cache import CachedBlock
    from neso.engine.sampling.state import SamplingState

NO_BLOCK = -1
"""In a block table: the block was freed because it is outside the attention window of all tokens to come."""
NO_PLACEHOLDERS: Mapping[int, bytes] = {}

CacheToken = int | bytes
"""What the prefix cache compares: a token id, or a digest of the content that replaces the token."""


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    RELEASED = "released"


class SequenceGroup(Protocol):
    """Sequences of one request that are scheduled in the same step, and preempted and released together.

    A group that is preempted collapses to one member with the tokens that all have in common.
    """

    members: list[Sequence]
    size: int

    def num_ready_tokens(self, sequence: Sequence) -> int:
        """Tokens of a member that a step may compute now."""

    def common_prefix(self) -> list[int]:
        """The tokens that all members begin with."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and output tokens, and how many of them are computed.

    The scheduler lets `num_computed_tokens` catch up with `len(token_ids)`: prefill, decode, prefix hits and resuming
    after preemption are all that. While a step runs that samples the next token, a negative number is in its place
    in `token_ids`: see `StepPlan`.

    - arrival, rank: order of scheduling, see `WaitingQueue`
    - forks_pending: further sequences of the request (n > 1) that fork from this one when its prompt is computed
    - block_table: blocks in order of position; NO_BLOCK for those that `num_window_freed_blocks` counts (sinks stay)
    - num_cached_blocks: blocks that the prefix cache knows; cache_parent: its node for the last of them;
      prefix_match: cached blocks found for a waiting sequence
    - num_cached_tokens: prompt tokens that were found in the prefix cache when the sequence first ran
    - scheduled_ns: when it first ran, in ns of the monotonic clock
    - draft: tokens that may come next, computed beside the last known one
    - slot_copies: (from, to) positions whose keys and values the next step moves
    - sampling_state: random numbers and token counts of the sampler

    Set by add-ons:

    - addons: state by add-on
    - group: other sequences that it must be scheduled with
    - placeholders: prompt positions whose token id means nothing, with a digest of what is there instead
    - uses_sampler: False if an add-on takes the logits or hidden states of the last token
    - needs_every_position: prefix hits may not skip any position
    - sync_only: its steps need the tokens of the step before, so execution does not overlap
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
    cache_identity: tuple[str, ...] = ()
    cache_parent: Hashable = None
    prefix_match: list[CachedBlock] = field(default_factory=list)
    num_preemptions: int = 0
    scheduled_ns: int = 0
    draft: Draft | None = None
    slot_copies: list[tuple[int, int]] = field(default_factory=list)
    sampling_state: SamplingState | None = None
    addons: dict[object, Any] = field(default_factory=dict)
    group: SequenceGroup | None = None
    placeholders: Mapping[int, bytes] = field(default_factory=lambda: NO_PLACEHOLDERS)
    uses_sampler: bool = True
    needs_every_position: bool = False
    sync_only: bool = False

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
    def max_tokens(self) -> int:
        """Upper limit of prompt and output tokens."""
        return len(self.request.prompt_token_ids) + self.request.max_tokens

    @property
    def at_limit(self) -> bool:
        """Whether it has all its tokens; the last one may not be known yet."""
        return self.num_output_tokens >= self.request.max_tokens

    @property
    def num_ready_tokens(self) -> int:
        """Tokens that a step may compute now."""
        if self.at_limit:
            return 0
        return self.num_uncomputed_tokens if self.group is None else self.group.num_ready_tokens(self)

    @property
    def text_token_ids(self) -> list[int]:
        """The prompt without placeholders."""
        ids = self.request.prompt_token_ids
        return (
            [token for i, token in enumerate(ids) if i not in self.placeholders] if self.placeholders else ids
        )

    @property
    def cache_tokens(self) -> list[CacheToken] | list[int]:
        """`token_ids` as the prefix cache compares them."""
        if not self.placeholders:
            return self.token_ids
        return [self.placeholders.get(i, token) for i, token in enumerate(self.token_ids)]

    @property
    def order(self) -> tuple[float, int, int]:
        """Sort key of scheduling; the last in order is preempted first."""
        return (self.rank, self.arrival, self.index)

    @property
    def waiting(self) -> bool:
        return self.status is SequenceStatus.WAITING

    @property
    def released(self) -> bool:
        return self.status is SequenceStatus.RELEASED

    def accept_drafts(self, path: list[int]) -> None:
        """Count draft tokens that were accepted as computed; `path` has their indices in the draft, ascending.

        Their keys and values are behind those of the known tokens, in the order of the draft. Those of a tree that
        are not in their final position are moved by the next step.
        """
        known = self.num_computed_tokens
        self.num_computed_tokens += len(path)
        self.slot_copies = [(known + node, known + place) for place, node in enumerate(path) if node != place]


def finish_reason(request: EngineRequest, token_ids: list[int], token_id: int) -> FinishReason | None:
    """Why a sequence ends with `token_id`, which follows `token_ids` (prompt and output); None if it goes on."""
    params = request.sampling
    num_output = len(token_ids) + 1 - len(request.prompt_token_ids)
    ends = token_id in request.end_token_ids or (
        bool(params.stop_words) and _ends_with_stop_word(request, token_ids, token_id)
    )
    if ends and num_output > params.min_tokens:
        return FinishReason.STOP
    if num_output >= request.max_tokens:
        return FinishReason.LENGTH
    return None


def _ends_with_stop_word(request: EngineRequest, token_ids: list[int], token_id: int) -> bool:
    prompt_length = len(request.prompt_token_ids)
    return any(
        word[-1] == token_id
        and token_ids[max(prompt_length, len(token_ids) - len(word) + 1) :] == list(word[:-1])
        for word in request.sampling.stop_words
    )
