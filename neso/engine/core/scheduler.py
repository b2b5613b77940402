"""Scheduler: decides which tokens every step computes."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable

from neso.engine.core.addon import Addon, RequestError, overriding
from neso.engine.core.admission import StaticBatches, WaitingQueue, admission_policy
from neso.engine.core.attention_window import AttentionWindow
from neso.engine.core.block_pool import IntegrityError
from neso.engine.core.kv_manager import BlockHold, KVCacheManager
from neso.engine.core.request import EngineRequest
from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.core.sequence import Sequence, SequenceGroup, SequenceStatus, scheduling_order
from neso.engine.core.stats import StaticBatchStats
from neso.engine.core.step import ScheduledSequence, Step

PrefillBudget = Callable[[int, int], int | None]


class Scheduler:
    """Spends a token budget per step on letting sequences catch up; there are no prefill or decode phases.

    Running sequences are scheduled first, in order of priority and arrival; then waiting sequences are admitted while
    there is room. If a sequence cannot get its blocks, the last running sequence is preempted and recomputed later. The
    first sequence in order can always continue, so there is no livelock.

    `overlaps`: a step may be scheduled before the results of the previous one are known.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        window: AttentionWindow | None = None,
        num_host_blocks: int = 0,
        addons: Iterable[Addon] = (),
        *,
        overlaps: bool = False,
    ) -> None:
        self.config = config
        self.kv = KVCacheManager(
            num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            window=window,
            max_new_tokens=config.max_prefill_chunk,
            max_unregistered_tokens=config.max_prefill_chunk if overlaps else 0,
            num_host_blocks=num_host_blocks,
        )
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(config.max_queue_size, config.priority_ageing_seconds)
        self.num_preemptions = 0
        self.num_sync_only = 0
        """Number of waiting and running sequences whose steps must not overlap."""
        self._policy = admission_policy(
            config.batch_scheduler_policy, config.gpt_model_type, self.kv, config.max_num_seqs
        )
        self._prefill_left = 0
        self._sequences_of: dict[str, list[Sequence]] = {}
        self._next_id = 0
        addons = list(addons)
        self._on_admit, self._on_fork = overriding(addons, "admit"), overriding(addons, "fork")
        self._on_start, self._on_stop = overriding(addons, "start"), overriding(addons, "stop")
        self._on_release, self._gates = overriding(addons, "release"), overriding(addons, "can_start")
        self._drafters = overriding(addons, "draft")

    # -- life of a sequence -------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> Sequence:
        """Queue a request.

        Raises `QueueFull` if too many requests wait, `RequestError` if an add-on rejects it, and `ValueError` if its id
        is in use or it can never run.
        """
        if request.request_id in self._sequences_of:
            raise ValueError(f"request id '{request.request_id}' is in use")
        num_sequences = request.sampling.num_sequences
        if num_sequences > self.config.max_num_seqs:
            raise ValueError(
                f"{num_sequences} sequences are requested, at most {self.config.max_num_seqs} can run"
            )
        self.waiting.check_room()
        if request.output_token_ids:
            _check_resumable(request)
        known = [*request.prompt_token_ids, *request.output_token_ids]
        sequence = self._new_sequence(request, index=0, token_ids=known)
        sequence.rank = self.waiting.rank(request.priority, request.queue_delay)
        sequence.forks_pending = num_sequences - 1
        sequence.cache_identity = request.cache_identity
        self.waiting.add(sequence)
        try:
            for addon in self._on_admit:
                addon.admit(sequence)
            self._check_capacity(sequence)
        except Exception:
            sequence.sync_only, sequence.forks_pending = False, 0
            self.release(sequence)
            raise
        self.num_sync_only += sequence.needs_sync_steps
        return sequence

    def request_ids(self) -> list[str]:
        """Return the ids of the requests in flight."""
        return list(self._sequences_of)

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """Return the unreleased sequences of a request."""
        return list(self._sequences_of.get(request_id, ()))

    def reserve(self, num_blocks: int) -> BlockHold | None:
        """Allocate blocks for a transfer from another engine; None if running sequences may need them."""
        return self.kv.reserve(num_blocks) if self._policy.can_reserve(num_blocks, self.running) else None

    def fork(self, parent: Sequence) -> list[Sequence]:
        """Create the pending forks of `parent`, sharing its blocks."""
        count, parent.forks_pending = parent.forks_pending, 0
        self.num_sync_only -= bool(count) and not parent.needs_sync_steps
        return [self.fork_one(parent, i + 1) for i in range(count)]

    def fork_one(self, parent: Sequence, index: int) -> Sequence:
        """Create a running sequence of the same request that shares the blocks of `parent`."""
        child = self._new_sequence(parent.request, index=index, token_ids=list(parent.token_ids))
        child.rank, child.arrival = parent.rank, parent.arrival
        child.num_cached_tokens = parent.num_cached_tokens
        child.scheduled_ns = parent.scheduled_ns
        child.cache_identity, child.placeholders = parent.cache_identity, parent.placeholders
        child.group, child.uses_sampler = parent.group, parent.uses_sampler
        child.sync_only = parent.sync_only
        self.num_sync_only += child.needs_sync_steps
        child.status = SequenceStatus.RUNNING
        self.kv.fork(parent, child)
        bisect.insort(self.running, child, key=scheduling_order)
        for addon in self._on_fork:
            addon.fork(parent, child)
        return child

    def release(self, sequence: Sequence) -> None:
        """End a sequence in any state, and its group: free its blocks and remove it from all queues. Idempotent."""
        for member in [sequence] if sequence.group is None else list(sequence.group.members):
            self.release_one(member)

    def release_request(self, request_id: str) -> list[Sequence]:
        """Release and return all remaining sequences of a request."""
        sequences = self.sequences_of(request_id)
        for sequence in sequences:
            self.release_one(sequence)
        return sequences

    def release_one(self, sequence: Sequence) -> None:
        """Release one member of a group. Idempotent."""
        if sequence.released:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)
        self.kv.free(sequence)
        sequence.status = SequenceStatus.RELEASED
        self.num_sync_only -= sequence.needs_sync_steps
        siblings = self._sequences_of[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._sequences_of[sequence.request.request_id]
        for addon in self._on_release:
            addon.release(sequence)

    @property
    def num_requests(self) -> int:
        """Number of requests with unreleased sequences."""
        return len(self._sequences_of)

    @property
    def static_batch(self) -> StaticBatchStats:
        """Sizes of the last batch of static batching; zeros with in-flight batching."""
        return self._policy.stats if isinstance(self._policy, StaticBatches) else StaticBatchStats()

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # -- a step -------------------------------------------------------------------------------------------------

    def schedule(self, prefill_budget: PrefillBudget = lambda num_decoding, num_prompts: None) -> Step:
        """Choose the sequences of the next step and allocate their blocks.

        `prefill_budget` limits the prompt tokens, given the numbers of decoding and of prefilling sequences.
        """
        step = Step()
        self._policy.begin_step(self.running, self.waiting)
        num_decoding = sum(sequence.num_uncomputed_tokens == 1 for sequence in self.running)
        limit = prefill_budget(num_decoding, len(self.running) - num_decoding + len(self.waiting))
        self._prefill_left = self.config.max_num_batched_tokens if limit is None else limit
        budget = self._schedule_running(step)
        if budget and self.waiting:
            self._schedule_waiting(step, budget)
        return step

    def advance(self, step: Step) -> None:
        """Record that a step was started: its tokens count as computed, draft tokens only once they are accepted."""
        for scheduled in step.scheduled:
            sequence = scheduled.sequence
            if not sequence.released:
                sequence.num_computed_tokens = scheduled.end - scheduled.num_draft_tokens

    def register(self, step: Step) -> None:
        """Record that a step succeeded: other sequences may use the blocks that it filled."""
        for scheduled in step.scheduled:
            if not scheduled.sequence.released:
                self.kv.register_full_blocks(scheduled.sequence)

    def check_integrity(self) -> None:
        """Check that no blocks are lost and that the queues are consistent. Raises `IntegrityError`."""
        sequences = [*self.running, *self.waiting]
        self.kv.check_integrity(sequences)
        if self.num_sync_only != sum(sequence.needs_sync_steps for sequence in sequences):
            raise IntegrityError("num_sync_only does not match the sequences")

    def _schedule_running(self, step: Step) -> int:
        """Return the remaining token budget: 0 if a sequence was preempted, so that none is started."""
        budget = self.config.max_num_batched_tokens
        preempted = False
        i = 0
        while i < len(self.running):
            sequence = self.running[i]
            # Leave at least one token for every sequence behind, so that a long prompt does not stall decoding.
            behind = len(self.running) - i - 1
            scheduled = self._next_tokens(sequence, budget - behind)
            if scheduled.num_new_tokens == 0:
                i += 1
            elif self._add_to_step(scheduled, step):
                budget -= scheduled.num_new_tokens
                i += 1
            else:
                preempted = True
                self._preempt(self.running[-1], step)
        return 0 if preempted else budget

    def _schedule_waiting(self, step: Step, budget: int) -> None:
        slots = self.config.max_num_seqs - sum(1 + sequence.forks_pending for sequence in self.running)
        position = 0
        while position < len(self.waiting) and budget > 0:
            sequence = self.waiting[position]
            if not all(addon.can_start(sequence) for addon in self._gates):
                position += 1
                continue
            if slots < 1 + sequence.forks_pending or not self._policy.considers(sequence):
                break
            self.kv.attach_prefix(sequence)
            scheduled = self._next_tokens(sequence, budget)
            admitted = scheduled.num_new_tokens and self._policy.admits(sequence, self.running)
            if not (admitted and self._add_to_step(scheduled, step)):
                self.kv.free(sequence)
                break
            self._start(sequence)
            budget -= scheduled.num_new_tokens
            slots -= 1 + sequence.forks_pending

    def _next_tokens(self, sequence: Sequence, budget: int) -> ScheduledSequence:
        """Return the tokens of a sequence in this step; none if it must wait for a later step."""
        wanted = sequence.num_ready_tokens
        if sequence.num_uncomputed_tokens > 1:
            wanted = min(wanted, self._prefill_left)
        num_new = min(wanted, self.config.max_prefill_chunk, budget)
        scheduled = ScheduledSequence(sequence, num_new)
        if sequence.addons and num_new > 0 and scheduled.samples:
            for addon in self._drafters:
                draft = addon.draft(sequence, num_new)
                if draft is not None:
                    num_drafts = min(len(draft), budget - num_new)
                    scheduled.draft = draft
                    scheduled.num_draft_tokens = self._policy.draft_tokens(sequence, num_new, num_drafts)
                    scheduled.num_new_tokens += scheduled.num_draft_tokens
                    break
        return scheduled

    def _add_to_step(self, scheduled: ScheduledSequence, step: Step) -> bool:
        """Allocate the blocks of a scheduled sequence, without its draft if needed, and add it to the step.

        Returns False if there are too few blocks.
        """
        copies = self.kv.try_grow(scheduled.sequence, scheduled.end)
        if copies is None and scheduled.num_draft_tokens:
            scheduled.drop_drafts()
            copies = self.kv.try_grow(scheduled.sequence, scheduled.end)
        if copies is None:
            return False
        step.scheduled.append(scheduled)
        step.block_copies.extend(copies)
        if scheduled.sequence.num_uncomputed_tokens > 1:
            self._prefill_left -= scheduled.num_new_tokens - scheduled.num_draft_tokens
        return True

    def _start(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        sequence.prefix_match = []
        bisect.insort(self.running, sequence, key=scheduling_order)
        for addon in self._on_start:
            addon.start(sequence)
        if not sequence.num_preemptions:
            sequence.scheduled_ns = time.monotonic_ns()
            hit_tokens = sequence.num_computed_tokens - sequence.num_imported_tokens
            sequence.num_cached_tokens = min(hit_tokens, sequence.num_prompt_tokens)
            stats = self.kv.prefix_cache.stats
            stats.queried_tokens += sequence.num_tokens
            stats.hit_tokens += hit_tokens

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        for addon in self._on_stop:
            addon.stop(sequence)

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        if sequence.group is not None:
            sequence = self._collapse(sequence.group, step)
        self._stop(sequence)
        self.kv.free(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(sequence)

    def _collapse(self, group: SequenceGroup, step: Step) -> Sequence:
        """Reduce a group to one member with the common prefix, and remove the group from the step."""
        # The group's block copies stay in the step: their targets are not reallocated before the next step.
        step.scheduled = [scheduled for scheduled in step.scheduled if scheduled.sequence.group is not group]
        leader, *others = group.members
        leader.token_ids = group.common_prefix()
        for sequence in others:
            self.release_one(sequence)
        group.members = [leader]
        leader.forks_pending = group.size - 1
        return leader

    def _check_capacity(self, sequence: Sequence) -> None:
        """Check that the cache can hold a sequence and its group when they run alone. Raises `ValueError`."""
        longest = sequence.max_tokens
        size = 1 if sequence.group is None else sequence.group.size
        # A group shares the prompt.
        shared = sequence.num_prompt_tokens // self.config.block_size
        needed = min(
            shared + (self.kv.blocks_for(longest) - shared) * size, self.kv.max_blocks_held(longest) * size
        )
        if needed > self.kv.pool.num_blocks:
            each = "" if size == 1 else f" for each of {size} sequences"
            raise ValueError(
                f"prompt and max_tokens need {longest} tokens of KV cache{each}, there are "
                f"{self.kv.pool.num_blocks * self.config.block_size}"
            )

    def _new_sequence(self, request: EngineRequest, index: int, token_ids: list[int]) -> Sequence:
        self._next_id += 1
        sequence = Sequence(
            id=self._next_id, request=request, arrival=self._next_id, index=index, token_ids=token_ids
        )
        self._sequences_of.setdefault(request.request_id, []).append(sequence)
        return sequence


def _check_resumable(request: EngineRequest) -> None:
    """Check that a request with `output_token_ids` can continue. Raises `RequestError`."""
    field = "output_token_ids"
    if request.sampling.num_sequences > 1 or request.pooling is not None:
        raise RequestError("only a request with one generated sequence can continue", field)
    if len(request.output_token_ids) >= request.max_tokens:
        raise RequestError(
            f"{len(request.output_token_ids)} tokens were generated already, max_tokens is {request.max_tokens}",
            field,
        )
