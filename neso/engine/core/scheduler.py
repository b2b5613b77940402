"""Decides what every step computes."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable

from neso.engine.core.adapter_slots import AdapterSlots
from neso.engine.core.admission import WaitingQueue, admission_policy
from neso.engine.core.attention_window import AttentionWindow
from neso.engine.core.input_embeddings import EmbeddingRows
from neso.engine.core.kv_manager import BlockCopy, KVCacheManager
from neso.engine.core.lockstep import Lockstep
from neso.engine.core.prefix_cache import BlockTransfer
from neso.engine.core.request import EngineRequest
from neso.engine.core.schedule import Schedule, ScheduledSequence
from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.core.sequence import Sequence, SequenceStatus

PrefillBudget = Callable[[int, int], int | None]


class Scheduler:
    """Spends a token budget a step on letting sequences catch up; knows no phases.

    Running sequences go first, in order of priority and arrival, then waiting ones are admitted while there is
    room. A sequence that cannot get its blocks takes them from the last running one, which starts over later
    (preemption by recompute); the first in order can always go on, so there is no livelock.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        window: AttentionWindow | None = None,
        adapters: AdapterSlots | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        self.config = config
        self.adapters = adapters or AdapterSlots(0)
        self.kv = KVCacheManager(
            num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            window=window,
            max_new_tokens=config.max_prefill_chunk,
            num_host_blocks=num_host_blocks,
        )
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(config.max_queue_size, config.priority_ageing_seconds)
        self.num_preemptions = 0
        self._policy = admission_policy(
            config.batch_scheduler_policy, config.gpt_model_type, self.kv, config.max_num_seqs
        )
        self._prefill_left = 0
        self._sequences_of: dict[str, list[Sequence]] = {}
        self._next_id = 0
        self._released: list[Sequence] = []

    # -- requests in, requests out ------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> Sequence:
        """Queue a request. Raises `ValueError` if its id is in use or can never run, `QueueFull` if too many wait."""
        if request.request_id in self._sequences_of:
            raise ValueError(f"request id '{request.request_id}' is in use")
        num_sequences = request.sampling.num_sequences
        if num_sequences > self.config.max_num_seqs:
            raise ValueError(
                f"{num_sequences} are asked for, at most {self.config.max_num_seqs} sequences can run"
            )
        needed = self._blocks_at_most(request)
        if needed > self.kv.pool.num_blocks:
            longest = len(request.prompt_token_ids) + request.max_tokens
            beams = f" for each of {request.sampling.beam_width} beams" if request.sampling.uses_beams else ""
            raise ValueError(
                f"prompt and max_tokens need {longest} tokens of cache{beams}, there are "
                f"{self.kv.pool.num_blocks * self.config.block_size}"
            )
        self.waiting.check_room()
        sequence = self._new_sequence(request, index=0, token_ids=list(request.prompt_token_ids))
        sequence.rank = self.waiting.rank(request.priority)
        sequence.forks_pending = num_sequences - 1
        sequence.embedding_rows = EmbeddingRows.of(request.input_embeddings)
        if request.sampling.uses_beams:
            sequence.lockstep = Lockstep([sequence], num_sequences)
        self.waiting.add(sequence)
        return sequence

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """The sequences of a request that are not released."""
        return list(self._sequences_of.get(request_id, ()))

    def release(self, sequence: Sequence) -> None:
        """The one way out, however a sequence ends: give back its blocks and forget it. Idempotent.

        Those that it is in lockstep with go with it.
        """
        for member in [sequence] if sequence.lockstep is None else list(sequence.lockstep.members):
            self.drop(member)

    def release_request(self, request_id: str) -> list[Sequence]:
        """Release all sequences that a request has left; returns them."""
        sequences = self.sequences_of(request_id)
        for sequence in sequences:
            self.drop(sequence)
        return sequences

    def drop(self, sequence: Sequence) -> None:
        """Release one sequence alone. Idempotent."""
        if sequence.released:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self.adapters.release(sequence)
        else:
            self.waiting.remove(sequence)
        self.kv.free(sequence)
        sequence.status = SequenceStatus.RELEASED
        siblings = self._sequences_of[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._sequences_of[sequence.request.request_id]
        self._released.append(sequence)

    def take_released(self) -> list[Sequence]:
        """Sequences released since the last call, for those who keep state by sequence."""
        released, self._released = self._released, []
        return released

    @property
    def num_requests(self) -> int:
        """Requests that have a sequence left."""
        return len(self._sequences_of)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # -- a step -------------------------------------------------------------------------------------------------

    def schedule(self, prefill_budget: PrefillBudget = lambda num_decoding, num_prompts: None) -> Schedule:
        """Choose the sequences of the next step and give them their blocks.

        `prefill_budget` limits the prompt tokens, given the numbers of sequences that decode and that are not
        through their prompts.
        """
        plan = Schedule()
        self._policy.begin_step(self.running, self.waiting)
        num_decoding = sum(sequence.num_uncomputed_tokens == 1 for sequence in self.running)
        limit = prefill_budget(num_decoding, len(self.running) - num_decoding + len(self.waiting))
        self._prefill_left = self.config.max_num_batched_tokens if limit is None else limit
        preempted = self._schedule_running(plan)
        if not preempted:
            self._schedule_waiting(plan)
        return plan

    def take_transfers(self) -> list[BlockTransfer]:
        """Copies between the tiers of the cache that the next step has to make: those of steps that never ran, too."""
        return self.kv.prefix_cache.host.take_transfers()

    def commit(self, plan: Schedule) -> None:
        """Take note that the step has run: its tokens are in the cache now, drafts only if they are accepted yet."""
        for share in plan.scheduled:
            if not share.sequence.released:
                share.sequence.num_computed_tokens = share.end - share.num_draft_tokens
                self.kv.cache_full_blocks(share.sequence)

    def fork(self, parent: Sequence) -> list[Sequence]:
        """Make the sequences that `parent` has pending, on its blocks."""
        children = [self.fork_one(parent, i + 1) for i in range(parent.forks_pending)]
        parent.forks_pending = 0
        return children

    def fork_one(self, parent: Sequence, index: int) -> Sequence:
        """Make a running sequence of the same request on the blocks of `parent`."""
        child = self._new_sequence(parent.request, index=index, token_ids=list(parent.token_ids))
        child.rank, child.arrival = parent.rank, parent.arrival
        child.num_cached_tokens = parent.num_cached_tokens
        child.num_scored_positions = parent.num_scored_positions
        child.scheduled_ns = parent.scheduled_ns
        child.embedding_rows = parent.embedding_rows
        child.lockstep = parent.lockstep
        child.status = SequenceStatus.RUNNING
        self.kv.fork(parent, child)
        self.adapters.acquire(child)
        bisect.insort(self.running, child, key=lambda s: s.order)
        return child

    def check_integrity(self) -> None:
        """Check the conservation of blocks and the queues. Raises `IntegrityError`."""
        self.kv.check_integrity([*self.running, *self.waiting])
        self.adapters.check_integrity(self.running)

    def _schedule_running(self, plan: Schedule) -> bool:
        budget = self.config.max_num_batched_tokens
        preempted = False
        i = 0
        while i < len(self.running):
            sequence = self.running[i]
            # Everyone behind gets a token at least: a long prompt must not stall those who are decoding.
            behind = len(self.running) - i - 1
            share = self._share(sequence, budget - behind)
            if share.num_new_tokens == 0:
                i += 1
                continue
            copies = self._grow(share)
            if copies is None:
                preempted = True
                self._preempt(self.running[-1], plan)
                continue
            plan.scheduled.append(share)
            plan.block_copies.extend(copies)
            self._spend(share)
            budget -= share.num_new_tokens
            i += 1
        return preempted

    def _share(self, sequence: Sequence, budget: int) -> ScheduledSequence:
        """What a sequence may have in this step: no tokens when it must wait for a later one."""
        wanted = sequence.num_ready_tokens
        if wanted > 1:
            wanted = min(wanted, self._prefill_left)
        num_new = min(wanted, self.config.max_prefill_chunk, budget)
        share = ScheduledSequence(sequence, num_new)
        if sequence.draft is not None and num_new > 0 and share.samples:
            # The root of a tree is the first token of a share.
            if sequence.draft.tree is not None and num_new > 1:
                return share
            num_drafts = min(len(sequence.draft), budget - num_new)
            share.num_draft_tokens = self._policy.draft_tokens(sequence, num_new, num_drafts)
            share.num_new_tokens += share.num_draft_tokens
        return share

    def _grow(self, share: ScheduledSequence) -> list[BlockCopy] | None:
        """Its blocks; where there are none left for what may turn out wrong, without the draft."""
        copies = self.kv.try_grow(share.sequence, share.end)
        if copies is None and share.num_draft_tokens:
            share.drop_drafts()
            copies = self.kv.try_grow(share.sequence, share.end)
        return copies

    def _spend(self, share: ScheduledSequence) -> None:
        if share.sequence.num_uncomputed_tokens > 1:
            self._prefill_left -= share.num_new_tokens - share.num_draft_tokens

    def _schedule_waiting(self, plan: Schedule) -> None:
        budget = self.config.max_num_batched_tokens - plan.num_tokens
        slots = self.config.max_num_seqs - sum(1 + sequence.forks_pending for sequence in self.running)
        position = 0
        self.adapters.begin_admission()
        while position < len(self.waiting) and budget > 0:
            sequence = self.waiting[position]
            if not self.adapters.admits(sequence):
                # It waits for its adapter; those behind it need not.
                position += 1
                continue
            if slots < 1 + sequence.forks_pending or not self._policy.considers(sequence):
                break
            self.kv.attach_prefix(sequence)
            share = self._share(sequence, budget)
            copies = None
            if share.num_new_tokens and self._policy.admits(sequence, self.running):
                copies = self._grow(share)
            if copies is None:
                self.kv.free(sequence)
                break
            self._admit(sequence)
            plan.scheduled.append(share)
            plan.block_copies.extend(copies)
            self._spend(share)
            budget -= share.num_new_tokens
            slots -= 1 + sequence.forks_pending

    def _admit(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        bisect.insort(self.running, sequence, key=lambda s: s.order)
        self.adapters.acquire(sequence)
        if not sequence.num_preemptions:
            sequence.scheduled_ns = time.monotonic_ns()
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.kv.prefix_cache.stats.record(sequence.num_tokens, sequence.num_computed_tokens)

    def _preempt(self, sequence: Sequence, plan: Schedule) -> None:
        if sequence.lockstep is not None:
            sequence = self._fold(sequence.lockstep, plan)
        self.running.remove(sequence)
        self.adapters.release(sequence)
        self.kv.free(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(sequence)

    def _fold(self, group: Lockstep, plan: Schedule) -> Sequence:
        """Leave one member of a group, with what all have in common, and take the group out of the step."""
        # What was to be copied for it is copied all the same, into blocks that nobody takes in this step.
        plan.scheduled = [share for share in plan.scheduled if share.sequence.lockstep is not group]
        leader, *others = group.members
        leader.token_ids = group.common_prefix()
        for sequence in others:
            self.drop(sequence)
        group.members = [leader]
        leader.forks_pending = group.size - 1
        return leader

    def _blocks_at_most(self, request: EngineRequest) -> int:
        """Blocks without which a request could not be finished alone."""
        longest = len(request.prompt_token_ids) + request.max_tokens
        shared = len(request.prompt_token_ids) // self.config.block_size
        width = request.sampling.beam_width
        # Beams share the prompt, and go on side by side.
        return min(
            shared + (self.kv.blocks_for(longest) - shared) * width, self.kv.max_blocks_held(longest) * width
        )

    def _new_sequence(self, request: EngineRequest, index: int, token_ids: list[int]) -> Sequence:
        self._next_id += 1
        sequence = Sequence(
            id=self._next_id, request=request, arrival=self._next_id, index=index, token_ids=token_ids
        )
        self._sequences_of.setdefault(request.request_id, []).append(sequence)
        return sequence
