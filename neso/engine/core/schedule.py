"""What a step computes: who gets how many tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from neso.engine.core.kv_manager import BlockCopy
from neso.engine.core.prefix_cache import BlockTransfer
from neso.engine.core.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """The share of a sequence in a step: `num_new_tokens` from its `num_computed_tokens` on.

    The last `num_draft_tokens` of them are the first ones of its draft.
    """

    sequence: Sequence
    num_new_tokens: int
    num_draft_tokens: int = 0

    @property
    def end(self) -> int:
        return self.sequence.num_computed_tokens + self.num_new_tokens

    @property
    def samples(self) -> bool:
        """Whether this share reaches the last known token, so that the next can be sampled."""
        return self.end - self.num_draft_tokens == self.sequence.num_tokens

    @property
    def decodes(self) -> bool:
        """Whether it has nothing but the token that was sampled last, and its draft."""
        return self.num_new_tokens - self.num_draft_tokens == 1 and self.samples

    def drop_drafts(self, kept: int = 0) -> None:
        """Leave the tokens of the draft out, all but the first ones."""
        self.num_new_tokens -= self.num_draft_tokens - kept
        self.num_draft_tokens = kept


@dataclass(slots=True)
class Schedule:
    """What a step computes, before it is laid out as arrays."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)
    block_transfers: list[BlockTransfer] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        return [share.sequence for share in self.scheduled]

    @property
    def live_sequences(self) -> list[Sequence]:
        """Those that were not released since."""
        return [sequence for sequence in self.sequences if not sequence.released]

    def drop_released(self) -> None:
        """Leave sequences out that were released since."""
        self.scheduled = [share for share in self.scheduled if not share.sequence.released]

    @property
    def num_decoding(self) -> int:
        """Sequences that only get the token that was sampled last, and what may follow it."""
        return sum(share.decodes for share in self.scheduled)

    @property
    def num_draft_tokens(self) -> int:
        return sum(share.num_draft_tokens for share in self.scheduled)

    @property
    def num_tokens(self) -> int:
        return sum(share.num_new_tokens for share in self.scheduled)
