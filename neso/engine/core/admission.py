"""Queue of waiting sequences, and the policies that decide when a waiting sequence may start."""

from __future__ import annotations

import bisect
import heapq
import time
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Protocol

from neso.engine.core.kv_manager import KVCacheManager
from neso.engine.core.request import EngineRequest
from neso.engine.core.scheduler_config import STATIC_BATCHING, BatchSchedulerPolicy, GptModelType
from neso.engine.core.sequence import Sequence, scheduling_order
from neso.engine.core.stats import StaticBatchStats


class QueueFull(Exception):
    """The waiting queue has reached its limit."""


def expiry_message(request: EngineRequest) -> str:
    """Return the error of a request that has waited for its queue_timeout_ms."""
    return f"the request has waited for queue_timeout_ms, {request.queue_timeout_ms:g} ms"


class WaitingQueue(list[Sequence]):
    """Waiting sequences, sorted by `Sequence.order`. Limits their number and the time they spend in the queue.

    Changed only by `add` and `remove`.

    A request goes before higher-priority requests that arrive more than `ageing_seconds` later per priority level of
    difference. The order of two requests therefore never changes, and only requests that arrived within a bounded time
    can delay a request, so no request starves. With 0 seconds, priorities are strict.
    """

    def __init__(
        self,
        max_size: int | None = None,
        ageing_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._max_size = max_size
        self._ageing_seconds = ageing_seconds
        self._clock = clock
        self._limited: dict[int, Sequence] = {}  # sequences with a time limit, by id
        # (deadline, sequence id), earliest first; entries that are not in `_limited` are stale.
        self._deadlines: list[tuple[float, int]] = []

    @property
    def num_paused(self) -> int:
        """Number of preempted sequences."""
        return sum(sequence.num_preemptions > 0 for sequence in self)

    def rank(self, priority: int, delay: float = 0.0) -> float:
        """Return the sort key of a request that arrives `delay` seconds after now; lower goes first.

        Strict priorities have no arrival times: the delay then has no effect.
        """
        if not self._ageing_seconds:
            return float(priority)
        return self._clock() + delay + priority * self._ageing_seconds

    def check_room(self) -> None:
        """Check the queue's limit. Raises `QueueFull`."""
        if self._max_size is not None and len(self) >= self._max_size:
            raise QueueFull(f"{len(self)} requests wait already, max_queue_size is {self._max_size}")

    def add(self, sequence: Sequence) -> None:
        """Add a new or preempted sequence."""
        bisect.insort(self, sequence, key=scheduling_order)
        limit = sequence.request.queue_timeout_ms
        if limit is not None and not sequence.num_preemptions:
            self._limited[sequence.id] = sequence
            heapq.heappush(self._deadlines, (self._clock() + limit / 1000, sequence.id))

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that starts or ends."""
        super().remove(sequence)
        if (
            self._limited.pop(sequence.id, None) is not None
            and len(self._deadlines) > 2 * len(self._limited) + 64
        ):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._limited]
            heapq.heapify(self._deadlines)

    def expired(self) -> list[Sequence]:
        """Return the sequences that have exceeded queue_timeout_ms and never ran; each is returned once."""
        found: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            _, sequence_id = heapq.heappop(self._deadlines)
            sequence = self._limited.pop(sequence_id, None)
            if sequence is not None:
                found.append(sequence)
        return found


class AdmissionPolicy(Protocol):
    """Decides whether a waiting sequence may start if there is a slot and token budget.

    Blocks are allocated afterwards. A sequence that may not start blocks the sequences behind it (head-of-line
    blocking).
    """

    def begin_step(self, running: Collection[Sequence], waiting: Iterable[Sequence]) -> None:
        """Called before a step is scheduled."""

    def considers(self, sequence: Sequence) -> bool:
        """Whether `sequence`, the head of the queue, is eligible; called before its prefix is looked up."""

    def admits(self, sequence: Sequence, running: Collection[Sequence]) -> bool:
        """Whether `sequence`, the head of the queue, may start; its prefix hits are attached."""

    def can_reserve(self, num_blocks: int, running: Collection[Sequence]) -> bool:
        """Whether that many free blocks may be taken for a transfer from another engine."""

    def draft_tokens(self, sequence: Sequence, num_new_tokens: int, num_draft_tokens: int) -> int:
        """Return the number of draft tokens that a sequence may have in a step, in addition to its new tokens."""


class MaxUtilization:
    """Admits every sequence for which blocks are available now. If blocks run out, a running sequence is preempted.

    A transfer leaves a block for each running sequence.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def begin_step(self, running: Collection[Sequence], waiting: Iterable[Sequence]) -> None:
        pass

    def considers(self, sequence: Sequence) -> bool:
        return True

    def admits(self, sequence: Sequence, running: Collection[Sequence]) -> bool:
        return True

    def can_reserve(self, num_blocks: int, running: Collection[Sequence]) -> bool:
        return len(running) + num_blocks <= self._kv.pool.num_free

    def draft_tokens(self, sequence: Sequence, num_new_tokens: int, num_draft_tokens: int) -> int:
        return num_draft_tokens


class GuaranteedNoEvict:
    """Admits a sequence only if the cache has room for the maximum length of all running sequences. Never preempts.

    Shared blocks are counted once. A request whose `n` sequences may not fit together runs alone; only its own
    sequences may preempt each other.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def begin_step(self, running: Collection[Sequence], waiting: Iterable[Sequence]) -> None:
        pass

    def considers(self, sequence: Sequence) -> bool:
        return True

    def admits(self, sequence: Sequence, running: Collection[Sequence]) -> bool:
        return not running or self.can_reserve(self._kv.blocks_to_come(sequence), running)

    def can_reserve(self, num_blocks: int, running: Collection[Sequence]) -> bool:
        promised = sum(map(self._kv.blocks_to_come, running))
        return promised + num_blocks <= self._kv.pool.num_free

    def draft_tokens(self, sequence: Sequence, num_new_tokens: int, num_draft_tokens: int) -> int:
        return min(num_draft_tokens, self._kv.room_for_drafts(sequence, num_new_tokens))


class StaticBatches:
    """Forms a batch of waiting sequences when no sequence runs; the next batch starts when the whole batch has ended.

    Within a batch another policy decides. A sequence that does not fit starts the next batch.
    """

    def __init__(self, within: AdmissionPolicy, max_num_seqs: int) -> None:
        self._within = within
        self._max_num_seqs = max_num_seqs
        self._batch: set[int] = set()
        # Of the requests of the last batch, by sequence id: prompt length, maximum output length, number of sequences.
        self._sizes: dict[int, tuple[int, int, int]] = {}

    @property
    def stats(self) -> StaticBatchStats:
        """Sizes of the last batch."""
        sizes = self._sizes.values()
        longest = max((max_tokens for _, max_tokens, _ in sizes), default=0)
        return StaticBatchStats(
            sum(prompt for prompt, _, _ in sizes),
            sum(max_tokens * count for _, max_tokens, count in sizes),
            sum((longest - max_tokens) * count for _, max_tokens, count in sizes),
        )

    def begin_step(self, running: Collection[Sequence], waiting: Iterable[Sequence]) -> None:
        self._within.begin_step(running, waiting)
        if not running:
            self._batch = {sequence.id for sequence in islice(waiting, self._max_num_seqs)}
            if self._batch:
                self._sizes = {}

    def considers(self, sequence: Sequence) -> bool:
        return sequence.id in self._batch and self._within.considers(sequence)

    def admits(self, sequence: Sequence, running: Collection[Sequence]) -> bool:
        if self._within.admits(sequence, running):
            request = sequence.request
            sizes = (sequence.num_prompt_tokens, request.max_tokens, request.sampling.num_sequences)
            self._sizes[sequence.id] = sizes
            return True
        self._batch = set()
        return False

    def can_reserve(self, num_blocks: int, running: Collection[Sequence]) -> bool:
        return self._within.can_reserve(num_blocks, running)

    def draft_tokens(self, sequence: Sequence, num_new_tokens: int, num_draft_tokens: int) -> int:
        return self._within.draft_tokens(sequence, num_new_tokens, num_draft_tokens)


def admission_policy(
    policy: BatchSchedulerPolicy, model_type: GptModelType, kv: KVCacheManager, max_num_seqs: int
) -> AdmissionPolicy:
    """Return the policy for the options `batch_scheduler_policy` and `gpt_model_type`."""
    chosen: AdmissionPolicy = GuaranteedNoEvict(kv) if policy == "guaranteed_no_evict" else MaxUtilization(kv)
    return StaticBatches(chosen, max_num_seqs) if model_type in STATIC_BATCHING else chosen
