"""Statistics of the engine, sent after every step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import zip_longest
from typing import Literal, NamedTuple

import msgspec


class StepCounts(NamedTuple):
    """Contents of a step.

    Numbers of decoding and prefilling sequences, and of all new tokens, prompt tokens and draft tokens.
    """

    num_decoding: int = 0
    num_context: int = 0
    num_tokens: int = 0
    num_context_tokens: int = 0
    num_draft_tokens: int = 0


class StaticBatchStats(NamedTuple):
    """The last batch of static batching.

    - num_context_tokens, num_generation_tokens: sums of the prompt lengths and of the maximum output lengths
    - num_empty_slots: generation tokens by which sequences are shorter than the longest one of the batch
    """

    num_context_tokens: int = 0
    num_generation_tokens: int = 0
    num_empty_slots: int = 0


class DraftStats(msgspec.Struct, array_like=True):
    """Speculative-decoding counters since the start.

    - drafts: computed drafts, one per sequence and step
    - draft_tokens: tokens in all drafts; accepted_tokens: accepted draft tokens
    - accepted_at: number of drafts with at least 1, 2, ... accepted tokens
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = []

    def count(self, num_tokens: int, num_accepted: int) -> None:
        """Count a draft."""
        self.drafts += 1
        self.draft_tokens += num_tokens
        self.accepted_tokens += num_accepted
        while len(self.accepted_at) < num_accepted:
            self.accepted_at.append(0)
        for place in range(num_accepted):
            self.accepted_at[place] += 1

    def copy(self) -> DraftStats:
        """Return a snapshot."""
        return DraftStats(self.drafts, self.draft_tokens, self.accepted_tokens, list(self.accepted_at))

    def plus(self, earlier: DraftStats) -> DraftStats:
        """Return the sums of both."""
        places = zip_longest(self.accepted_at, earlier.accepted_at, fillvalue=0)
        return DraftStats(
            self.drafts + earlier.drafts,
            self.draft_tokens + earlier.draft_tokens,
            self.accepted_tokens + earlier.accepted_tokens,
            [new + old for new, old in places],
        )


_COUNTERS = (
    "step",
    "preemptions",
    "prefix_queried_tokens",
    "prefix_hit_tokens",
    "prefix_evicted_blocks",
    "host_loaded_blocks",
)


class LogitsProcessorStats(msgspec.Struct, array_like=True):
    """Counters of a logits processor: processed rows of logits, seconds, and rows for which it raised."""

    rows: int = 0
    seconds: float = 0.0
    failures: int = 0

    def copy(self) -> LogitsProcessorStats:
        """Return a snapshot."""
        return LogitsProcessorStats(self.rows, self.seconds, self.failures)

    def plus(self, other: LogitsProcessorStats) -> LogitsProcessorStats:
        """Return the sums."""
        return LogitsProcessorStats(
            self.rows + other.rows, self.seconds + other.seconds, self.failures + other.failures
        )


def _merged_processors(
    first: dict[str, LogitsProcessorStats], second: dict[str, LogitsProcessorStats]
) -> dict[str, LogitsProcessorStats]:
    merged = dict(first)
    for name, stats in second.items():
        merged[name] = stats.plus(merged[name]) if name in merged else stats
    return merged


FallbackReason = Literal["refused", "ended", "timeout", "disconnected", "no_blocks", "aborted", "error"]
"""Why an engine computes a prompt that another one has.

- refused: the engines do not fit together; ended: the export was aborted, or its lease has ended
- timeout, disconnected: of the other engine; no_blocks: for the transfer, in time
- aborted: never counted; error: anything else
"""


class KvTransferStats(msgspec.Struct, array_like=True):
    """Transfers of KV-cache blocks between engines. `leases`, `active_imports` are gauges, the others counters.

    - leases: exports that are computed or kept; expired_leases: those that nobody released
    - exports, exported_blocks: completed exports
    - imports: requests that got blocks of another engine; fallbacks_by_reason: requests that computed some of them
      themselves
    - imported_blocks, imported_bytes; import_seconds: spent with copying
    """

    leases: int = 0
    active_imports: int = 0
    exports: int = 0
    exported_blocks: int = 0
    expired_leases: int = 0
    imports: int = 0
    imported_blocks: int = 0
    imported_bytes: int = 0
    import_seconds: float = 0.0
    fallbacks_by_reason: dict[FallbackReason, int] = {}

    @property
    def fallbacks(self) -> int:
        return sum(self.fallbacks_by_reason.values())

    def copy(self) -> KvTransferStats:
        """Return a snapshot."""
        return msgspec.structs.replace(self, fallbacks_by_reason={**self.fallbacks_by_reason})

    def plus(self, other: KvTransferStats) -> KvTransferStats:
        """Return the sums."""
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__struct_fields__
            if name != "fallbacks_by_reason"
        }
        reasons = self.fallbacks_by_reason.keys() | other.fallbacks_by_reason.keys()
        fallbacks = {
            reason: self.fallbacks_by_reason.get(reason, 0) + other.fallbacks_by_reason.get(reason, 0)
            for reason in reasons
        }
        return KvTransferStats(**sums, fallbacks_by_reason=fallbacks)

    def after(self, earlier: KvTransferStats) -> KvTransferStats:
        """Return the gauges of this one, and the sums of the counters."""
        total = self.plus(earlier)
        total.leases, total.active_imports = self.leases, self.active_imports
        return total


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges as of the last step, and counters since the start.

    - num_requests: unfinished requests; num_running, num_waiting: sequences; num_paused: waiting sequences that were
      preempted
    - num_decoding, num_context, num_batched_tokens, num_context_tokens: see `StepCounts`
    - num_host_blocks: blocks in the host tier of the cache; host_loaded_blocks: blocks loaded back from it
    - host_memory, device_memory: bytes used by the engine process and on its device
    """

    step: int = 0
    num_requests: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_paused: int = 0
    num_decoding: int = 0
    num_context: int = 0
    num_batched_tokens: int = 0
    num_context_tokens: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_evicted_blocks: int = 0
    num_host_blocks: int = 0
    host_loaded_blocks: int = 0
    host_memory: int = 0
    device_memory: int = 0
    drafts: DraftStats = msgspec.field(default_factory=DraftStats)
    static_batch: StaticBatchStats = StaticBatchStats()
    logits_processors: dict[str, LogitsProcessorStats] = {}
    kv_transfer: KvTransferStats = msgspec.field(default_factory=KvTransferStats)

    def after(self, earlier: EngineStats) -> EngineStats:
        """Return these statistics with the counters of `earlier` added: those of an engine that was restarted."""
        counts = {name: getattr(self, name) + getattr(earlier, name) for name in _COUNTERS}
        return msgspec.structs.replace(
            self,
            **counts,
            drafts=self.drafts.plus(earlier.drafts),
            logits_processors=_merged_processors(earlier.logits_processors, self.logits_processors),
            kv_transfer=self.kv_transfer.after(earlier.kv_transfer),
        )

    @staticmethod
    def sum(engines: Sequence[EngineStats]) -> EngineStats:
        """Return the sums of the gauges and counters of the engines of a model."""
        if len(engines) == 1:
            return engines[0]
        numbers = {name: sum(getattr(stats, name) for stats in engines) for name in _NUMBERS}
        return EngineStats(
            **numbers,
            drafts=reduce(DraftStats.plus, (stats.drafts for stats in engines)),
            static_batch=StaticBatchStats(
                *map(sum, zip(*(stats.static_batch for stats in engines), strict=True))
            ),
            logits_processors=reduce(_merged_processors, (stats.logits_processors for stats in engines)),
            kv_transfer=reduce(KvTransferStats.plus, (stats.kv_transfer for stats in engines)),
        )


_NUMBERS = tuple(
    name
    for name in EngineStats.__struct_fields__
    if name not in ("drafts", "static_batch", "logits_processors", "kv_transfer")
)
