"""The engine: requests in, one step at a time, tokens out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from neso.engine.beams.addon import BeamSearch
from neso.engine.core.batch import Batch, build_batch
from neso.engine.core.block_pool import IntegrityError
from neso.engine.core.prefill_pacer import PrefillPacer
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.schedule import Schedule
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.core.sequence import Sequence
from neso.engine.core.stats import EngineStats, StepCounts
from neso.engine.core.step_plan import StepPlan
from neso.engine.diagnostics.memory import MemoryUse
from neso.engine.guided.guides import Guides
from neso.engine.loop.failed_requests import fail_requests, involved
from neso.engine.loop.intake import Intake
from neso.engine.loop.launched_step import LaunchedStep, can_run_ahead
from neso.engine.loop.prompt_scores import prompt_outputs
from neso.engine.loop.step_inputs import load_adapters, load_rows
from neso.engine.loop.token_choice import TokenChoice
from neso.engine.lora.manager import LoraManager
from neso.engine.pooling.decoder_pooling import DecoderPooling
from neso.engine.pooling.pooler import Pooler
from neso.engine.runners.base import CacheLayout, Runner
from neso.engine.sampling.sampler import SampledToken, Sampler, sampling_batch
from neso.engine.sampling.token_sampling import INVALID_TOKEN
from neso.engine.spec_decode.speculator import Speculator
from neso.engine.vision.image_encoder import ImageEncoder

logger = logging.getLogger(__name__)


class EngineCore:
    """Schedules, runs and samples; single-threaded, no I/O. `step` is the whole of it."""

    def __init__(
        self,
        runner: Runner,
        config: SchedulerConfig,
        num_blocks: int,
        guides: Guides | None = None,
        pooler: Pooler | None = None,
        images: ImageEncoder | None = None,
        num_host_blocks: int = 0,
        lora: LoraManager | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        slots = lora.slots if lora is not None else None
        self.scheduler = Scheduler(config, num_blocks, runner.window, slots, num_host_blocks)
        self.lora = lora
        self.runner = runner
        self.runner.allocate_cache(CacheLayout(num_blocks, config.block_size, num_host_blocks))
        self.recent_plans: deque[StepPlan] = deque(maxlen=2)  # one may run while the next is prepared
        self.record: Callable[[StepPlan], None] | None = None
        self._guides = guides or Guides()
        self.intake = Intake(self.scheduler, self._guides, lora, images, self._queued)
        self.choice = TokenChoice(self.scheduler, Sampler(runner.choose), self._guides, speculator)
        self._beams = BeamSearch(self.scheduler)
        self._pooling = DecoderPooling(pooler or Pooler("last"))
        self._pacer = PrefillPacer(config.max_decode_stretch)
        self._step = 0
        self._counts = StepCounts()
        self._memory = MemoryUse(runner)
        self._launched: LaunchedStep | None = None
        self._finished_at = 0.0
        self._speculator = speculator
        # Requests that keep the next step from being started before the tokens of the last are known.
        self._step_by_step: set[str] = set()

    @property
    def last_plan(self) -> StepPlan | None:
        """Of the step that was scheduled last."""
        return self.recent_plans[-1] if self.recent_plans else None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._launched is not None or self.intake.waits

    def add(self, request: EngineRequest) -> list[SequenceOutput]:
        """Take a request; one that can never run is answered at once with an error."""
        return self.intake.add(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forget a request, or one of its sequences, in whatever state; unknown ones are ignored."""
        for sequence in self.scheduler.sequences_of(request_id):
            # Beams are no sequences of the request's own: all of them go.
            if index is None or sequence.index == index or sequence.lockstep is not None:
                self.scheduler.release(sequence)
        if index is None:
            self._guides.drop(request_id)
        # At once: a new request may have this id before the next step.
        self._forget_released()

    def step(self) -> list[SequenceOutput]:
        """Run one step; returns what it gave, by sequence. Nothing that happens in it raises.

        With a runner that can overlap, the step that is scheduled is started before the one before is waited for, and
        what comes back is what that one gave.
        """
        outputs = self.intake.take()
        if not self._overlaps():
            outputs += self._finish_launched()
        if self._speculator is not None:
            self._speculator.propose(self.scheduler.running)
        try:
            schedule = self.scheduler.schedule(self._pacer.budget)
        except Exception as error:
            return outputs + self._fail(involved(self.scheduler), error)
        outputs += load_rows(schedule, self.scheduler)
        if self.lora is not None:
            outputs += load_adapters(schedule, self.scheduler, self.lora)
        self._forget_released()
        if not schedule.scheduled:
            outputs += self._finish_launched()
            if not outputs:
                self.intake.wait()
            return outputs
        self._step += 1
        try:
            batch = self._prepare(schedule)
        except Exception as error:
            return outputs + self._fail(schedule.sequences, error, schedule)
        if self._overlaps():
            return outputs + self._launch(schedule, batch)
        return outputs + self._run(schedule, batch)

    def _prepare(self, schedule: Schedule) -> Batch:
        """Lay out what the runner is to do."""
        schedule.block_transfers = self.scheduler.take_transfers()
        if self._speculator is not None:
            self._speculator.complete(schedule, self.choice.state)
        self._counts = StepCounts.of(schedule)
        batch = build_batch(schedule, self._step)
        self.recent_plans.append(batch.plan)
        if self.record is not None:
            self.record(batch.plan)
        return batch

    def _queued(self, sequence: Sequence) -> None:
        request = sequence.request
        step_by_step = request.pooling is not None or sequence.draft is not None
        if step_by_step or not can_run_ahead(request.sampling):
            self._step_by_step.add(request.request_id)
        self._beams.add(sequence)

    def _overlaps(self) -> bool:
        """Whether a step may start before the tokens of the one before are known."""
        return (
            self.runner.can_overlap
            and self.scheduler.config.enable_overlap
            and not self._step_by_step
            and self.record is None
            and self._speculator is None
        )

    def _run(self, schedule: Schedule, batch: Batch) -> list[SequenceOutput]:
        """A step from its start to its tokens."""
        started = time.perf_counter()
        try:
            logits = self.runner.step(batch.plan)
            self._observe(self._counts, time.perf_counter() - started)
            self.scheduler.commit(schedule)
            outputs = self._pool(batch) + prompt_outputs(batch, logits)
            outputs += self.choice.choose(batch, logits) + self._beams.advance(batch.beams, logits)
        except Exception as error:
            return self._fail(schedule.sequences, error, schedule)
        self._forget_released()
        return outputs

    def _launch(self, schedule: Schedule, batch: Batch) -> list[SequenceOutput]:
        """Start a step, then finish the one before."""
        try:
            states = [self.choice.state(sequence) for sequence in batch.sampled]
            tokens = self.runner.launch(batch.plan, sampling_batch(states))
        except Exception as error:
            outputs = self._finish_launched()
            return outputs + self._fail(schedule.live_sequences, error, schedule)
        launched = LaunchedStep(schedule, self._counts, tokens, states)
        outputs = self._finish_launched()
        try:
            # Only now: what is committed is registered by its tokens, and those of the step before are known at last.
            self.scheduler.commit(schedule)
            launched.append_pending(batch.sampled)
        except Exception as error:
            return outputs + self._fail(schedule.live_sequences, error, schedule)
        self._launched = launched
        return outputs

    def _finish_launched(self) -> list[SequenceOutput]:
        """Wait for the tokens of the step that was launched, if one was."""
        launched, self._launched = self._launched, None
        if launched is None:
            return []
        outputs: list[SequenceOutput] = []
        try:
            tokens = launched.tokens.wait().tolist()
            self._observe(launched.counts, launched.seconds_since(self._finished_at))
            self._finished_at = time.perf_counter()
            for (sequence, position), state, token in zip(
                launched.pending, launched.states, tokens, strict=True
            ):
                if not sequence.released:
                    if token != INVALID_TOKEN:
                        state.record(token)
                    outputs.append(self.choice.take(sequence, position, [SampledToken(token)]))
        except Exception as error:
            return outputs + self._fail(launched.schedule.live_sequences, error, launched.schedule)
        self._forget_released()
        return outputs

    def _observe(self, counts: StepCounts, seconds: float) -> None:
        self._pacer.observe(counts.num_decoding, counts.num_context_tokens, seconds)
        if self._speculator is not None:
            self._speculator.observe_step(counts, seconds)

    def stats(self) -> EngineStats:
        """The state of queues and cache."""
        scheduler, counts = self.scheduler, self._counts
        self._memory.refresh()
        prefix = scheduler.kv.prefix_cache
        return EngineStats(
            step=self._step,
            num_requests=scheduler.num_requests,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + self._guides.num_held,
            num_paused=scheduler.waiting.num_paused,
            num_decoding=counts.num_decoding,
            num_context=counts.num_context,
            num_batched_tokens=counts.num_tokens,
            num_context_tokens=counts.num_context_tokens,
            num_blocks=scheduler.kv.pool.num_blocks,
            num_used_blocks=scheduler.kv.pool.num_used,
            num_cached_blocks=len(prefix),
            preemptions=scheduler.num_preemptions,
            prefix_queried_tokens=prefix.stats.queried_tokens,
            prefix_hit_tokens=prefix.stats.hit_tokens,
            prefix_evicted_blocks=prefix.stats.evicted_blocks,
            num_host_blocks=len(prefix.host),
            host_loaded_blocks=prefix.host.stats.loaded_blocks,
            host_memory=self._memory.host,
            device_memory=self._memory.device,
            drafts=self.choice.draft_stats.copy(),
        )

    def check_integrity(self) -> None:
        """Check the books of the cache and of the sampler. Raises `IntegrityError`."""
        self.scheduler.check_integrity()
        self._forget_released()
        live = {s.id for s in [*self.scheduler.running, *self.scheduler.waiting]}
        if not self.choice.sequence_ids <= live:
            raise IntegrityError("the sampler remembers sequences that are gone")
        self._beams.check_integrity()

    def _pool(self, batch: Batch) -> list[SequenceOutput]:
        """Take the hidden states of prompts that are to become vectors; answer those that are through."""
        if not batch.pooled_rows:
            return []
        outputs = self._pooling.take(batch.pooled_rows, self.runner.hidden_states())
        for rows in batch.pooled_rows:
            if rows.last:
                self.scheduler.release(rows.sequence)
        return outputs

    def _fail(
        self, sequences: list[Sequence], error: Exception, schedule: Schedule | None = None
    ) -> list[SequenceOutput]:
        """Answer the sequences of a step that failed; its schedule, if it got so far."""
        logger.error("step %d failed", self._step, exc_info=error)
        outputs = fail_requests(self.scheduler, sequences, f"the model failed: {error}")
        if schedule is not None and schedule.block_transfers:
            # Nobody knows which of them were done.
            self.scheduler.kv.prefix_cache.clear()
        self._forget_released()
        return outputs

    def _forget_released(self) -> None:
        for sequence in self.scheduler.take_released():
            self.choice.forget(sequence)
            self._pooling.forget(sequence)
            if not self.scheduler.sequences_of(sequence.request.request_id):
                if self.lora is not None:
                    self.lora.unpin(sequence.request.request_id)
                self._step_by_step.discard(sequence.request.request_id)
                self._beams.forget(sequence.request.request_id)
                self._guides.drop(sequence.request.request_id)
