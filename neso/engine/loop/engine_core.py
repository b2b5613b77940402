"""Engine core: schedules requests, runs one step at a time, and returns tokens."""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from neso.engine.core.addon import Addon, RequestError, overriding
from neso.engine.core.admission import QueueFull, expiry_message
from neso.engine.core.prefill_pacer import PrefillPacer
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.core.sequence import Sequence
from neso.engine.core.stats import EngineStats, StepCounts
from neso.engine.core.step import Step
from neso.engine.core.step_plan import StepPlan
from neso.engine.diagnostics.memory import MemoryUse
from neso.engine.loop.token_selection import TokenSelector
from neso.engine.runners.base import CacheLayout, Runner
from neso.engine.sampling.sampler import LaunchedSampling, Sampler
from neso.engine.sampling.state import state_of
from neso.engine.sampling.token_sampling import INVALID_TOKEN

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.005
"""Seconds that an idle engine waits for background work, such as grammar compilation."""

T = TypeVar("T", bound=Addon)


@dataclass(slots=True)
class LaunchedStep:
    """A step that the runner may still execute.

    `pending`: the sequences that get a token, in the order of the tokens, and the token's position in each.
    """

    step: Step
    sampling: LaunchedSampling
    pending: list[tuple[Sequence, int]] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def append_placeholders(self) -> None:
        """Append numbers that represent the unknown tokens, so that the next step can be scheduled."""
        for row, scheduled in enumerate(self.step.sampled):
            self.pending.append((scheduled.sequence, scheduled.sequence.num_tokens))
            scheduled.sequence.token_ids.append(-1 - row)


class EngineCore:
    """Schedules, runs and samples. Single-threaded, no I/O.

    `addons`: engine features beyond plain decoding. `shares_cache`: other processes can map the KV cache.
    """

    def __init__(
        self,
        runner: Runner,
        config: SchedulerConfig,
        num_blocks: int,
        addons: Iterable[Addon] = (),
        num_host_blocks: int = 0,
        *,
        shares_cache: bool = False,
    ) -> None:
        self.runner = runner
        self.runner.allocate_cache(
            CacheLayout(num_blocks, config.block_size, num_host_blocks, shares_cache, config.max_num_seqs)
        )
        self.addons = list(addons)
        self._overlaps = runner.can_overlap and config.enable_overlap
        self.scheduler = Scheduler(
            config, num_blocks, runner.window, num_host_blocks, self.addons, overlaps=self._overlaps
        )
        if runner.shared_cache is not None:
            self.scheduler.kv.pool.epochs = runner.shared_cache.epochs
        self.selector = TokenSelector(self.scheduler, Sampler(runner.choose), self.addons)
        self.recent_plans: deque[StepPlan] = deque(maxlen=2)  # one may run while the next is prepared
        self.lost_device = False
        """Whether no further step can run in this process, after a failed one."""
        self.record: Callable[[StepPlan], None] | None = None
        """Called with every plan if set; steps then do not overlap."""
        self._pacer = PrefillPacer(config.max_decode_stretch)
        self._memory = MemoryUse(runner)
        self._num_steps = 0
        self._counts = StepCounts()
        self._ongoing: LaunchedStep | None = None
        self._finished_at = 0.0
        self._background_workers = overriding(self.addons, "has_work")
        self._beginners = overriding(self.addons, "begin_step")
        self._preparers = overriding(self.addons, "prepare")
        self._extenders = overriding(self.addons, "extend")
        self._updaters = overriding(self.addons, "update")
        self._observers = overriding(self.addons, "observe")
        self._reporters = overriding(self.addons, "stats")

    def addon(self, kind: type[T]) -> T | None:
        """Return the add-on of a class; None if the engine does not have it."""
        return next((addon for addon in self.addons if isinstance(addon, kind)), None)

    def set_wake(self, wake: Callable[[], None]) -> None:
        """Pass a thread-safe function to the add-ons that makes an idle engine call `has_work`."""
        for addon in self.addons:
            addon.set_wake(wake)

    def close(self) -> None:
        """End the background work of the add-ons."""
        for addon in self.addons:
            addon.close()

    @property
    def last_plan(self) -> StepPlan | None:
        """The plan of the last scheduled step."""
        return self.recent_plans[-1] if self.recent_plans else None

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return (
            self.scheduler.has_work
            or self._ongoing is not None
            or any(addon.has_work() for addon in self._background_workers)
        )

    def add(self, request: EngineRequest) -> list[SequenceOutput]:
        """Queue a request. Returns the error output at once if the request can never run."""
        name = request.request_id
        try:
            self.scheduler.add(request)
        except QueueFull as error:
            return [SequenceOutput.failed(name, 0, str(error), refused=True)]
        except ValueError as error:
            return [SequenceOutput.failed(name, 0, str(error), error_field=getattr(error, "field", ""))]
        except Exception as error:
            logger.exception("request '%s' failed before its first step", name)
            return [SequenceOutput.failed(name, 0, f"the request failed: {error}")]
        return []

    def request_ids(self) -> list[str]:
        """Return the ids of the requests in flight."""
        return self.scheduler.request_ids()

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Release a request, or one of its sequences. Unknown ids are ignored."""
        for sequence in self.scheduler.sequences_of(request_id):
            # Clients cannot address members of a group, so all of them are released.
            if index is None or sequence.index == index or sequence.group is not None:
                self.scheduler.release(sequence)

    # -- a step -------------------------------------------------------------------------------------------------

    def step(self) -> list[SequenceOutput]:
        """Run one step and return its outputs. Never raises: failures end the affected requests.

        If the runner can overlap steps, the step is only launched, and the outputs are those of the previous step.
        """
        # A recorded plan must have its tokens.
        if self._overlaps and not self.scheduler.num_sync_only and self.record is None:
            self._ongoing, outputs = self._overlapped_step(self._ongoing)
            return outputs
        last, self._ongoing = self._ongoing, None
        outputs = self._finish(last)
        step, plan, failed = self._next_step()
        outputs += failed
        if plan is not None:
            outputs += self._run(step, plan)
        elif not outputs:
            self._wait()
        return outputs

    def _overlapped_step(self, last: LaunchedStep | None) -> tuple[LaunchedStep | None, list[SequenceOutput]]:
        """Launch a step, then finish the previous one.

        If sampling depends on the tokens of the previous step, it is launched after that one has finished.
        Returns the launched step and the outputs of the previous one.
        """
        step, plan, outputs = self._next_step()
        if plan is None:
            outputs += self._finish(last)
            if not outputs:
                self._wait()
            return None, outputs
        started = time.perf_counter()
        sampling: LaunchedSampling | None = None
        failure: Exception | None = None
        try:
            states = [state_of(scheduled.sequence) for scheduled in step.sampled]
            logits = self.runner.launch(plan)
            if not self.selector.needs_known_tokens(step, states):
                sampling = self.selector.launch(step, logits, states)
        except Exception as error:
            failure = error
        outputs += self._finish(last)
        try:
            if failure is not None:
                raise failure
            if sampling is None:
                # The runner computes the step meanwhile.
                sampling = self.selector.launch(step, logits, states)
            self.scheduler.advance(step)
            launched = LaunchedStep(step, sampling, started=started)
            launched.append_placeholders()
        except Exception as error:
            return None, outputs + self._fail_step(step, error, _live(step))
        return launched, outputs

    def _next_step(self) -> tuple[Step, StepPlan | None, list[SequenceOutput]]:
        """Admit, schedule and plan.

        The plan is None if no sequence can run; the outputs are those of failed sequences.
        """
        outputs = self._fail_expired()
        step = Step()
        try:
            for addon in self._beginners:
                for sequence, error in addon.begin_step(self.scheduler):
                    outputs += self._fail([sequence], error)
            step = self.scheduler.schedule(self._pacer.budget)
        except Exception as failure:
            return step, None, outputs + self._fail_step(step, failure, _maybe_scheduled(self.scheduler))
        try:
            for addon in self._preparers:
                failures = addon.prepare(step, self.scheduler)
                for sequence, error in failures:
                    outputs += self._fail([sequence], error)
                if failures:
                    step.drop_released()
            if not step.scheduled:
                return step, None, outputs
            return step, self._plan(step), outputs
        except Exception as failure:
            return step, None, outputs + self._fail_step(step, failure, step.sequences)

    def _plan(self, step: Step) -> StepPlan:
        """Lay out the step and create the plan for the runner."""
        # Includes transfers of steps that were scheduled but never ran.
        step.block_transfers = self.scheduler.kv.prefix_cache.host.take_transfers()
        step.lay_out()
        for addon in self._extenders:
            if addon in step.users:
                addon.extend(step)
        self._num_steps += 1
        self._counts = step.counts
        plan = step.plan(self._num_steps)
        self.recent_plans.append(plan)
        if self.record is not None:
            self.record(plan)
        return plan

    def _run(self, step: Step, plan: StepPlan) -> list[SequenceOutput]:
        """Execute a step and sample."""
        started = time.perf_counter()
        outputs: list[SequenceOutput] = []
        try:
            logits = self.runner.step(plan)
            self._observe(step.counts, time.perf_counter() - started)
            self.scheduler.advance(step)
            self.scheduler.register(step)
            for addon in self._updaters:
                if addon in step.users:
                    outputs += addon.update(step, logits, self.scheduler)
            return outputs + self.selector.select(step, logits)
        except Exception as error:
            return self._fail_step(step, error, step.sequences)

    def _finish(self, launched: LaunchedStep | None) -> list[SequenceOutput]:
        """Wait for the tokens of a launched step, and append them to their sequences."""
        if launched is None:
            return []
        outputs: list[SequenceOutput] = []
        try:
            tokens = launched.sampling.wait()
            self._observe(
                launched.step.counts, time.perf_counter() - max(launched.started, self._finished_at)
            )
            self._finished_at = time.perf_counter()
            self.scheduler.register(launched.step)
            for (sequence, position), state, token in zip(
                launched.pending, launched.sampling.states, tokens, strict=True
            ):
                if not sequence.released:
                    if token.token_id != INVALID_TOKEN:
                        state.record(token.token_id)
                    outputs.append(self.selector.append_tokens(sequence, position, [token]))
        except Exception as error:
            return outputs + self._fail_step(launched.step, error, _live(launched.step))
        return outputs

    def _observe(self, counts: StepCounts, seconds: float) -> None:
        self._pacer.observe(counts.num_decoding, counts.num_context_tokens, seconds)
        for addon in self._observers:
            addon.observe(counts, seconds)

    def _wait(self) -> None:
        """Wait for background work, if there is any."""
        for addon in self.addons:
            addon.wait(_POLL_SECONDS)

    # -- failures -----------------------------------------------------------------------------------------------

    def _fail_expired(self) -> list[SequenceOutput]:
        outputs = []
        for sequence in self.scheduler.waiting.expired():
            error = RequestError(expiry_message(sequence.request))
            outputs += self._fail([sequence], error, refused=True)
        return outputs

    def _fail_step(self, step: Step, error: Exception, sequences: Iterable[Sequence]) -> list[SequenceOutput]:
        """End the requests of a failed step."""
        logger.error("step %d failed", self._num_steps, exc_info=error)
        # The frames of the runner hold intermediate results, and a reference cycle through the error would keep them.
        traceback.clear_frames(error.__traceback__)
        self.lost_device = self.runner.has_lost_device()
        if step.block_transfers:
            # Some of the step's block transfers may be done and others not.
            self.scheduler.kv.prefix_cache.clear()
        return self._fail(sequences, RequestError(f"the model failed: {error}"))

    def _fail(
        self, sequences: Iterable[Sequence], error: RequestError, *, refused: bool = False
    ) -> list[SequenceOutput]:
        """End `sequences` with an error, and all other sequences of their requests.

        Already released sequences get an error output as well, because the output that reported their end was lost.
        """
        ended = dict.fromkeys(sequences)
        for request_id in dict.fromkeys(sequence.request.request_id for sequence in ended):
            ended |= dict.fromkeys(self.scheduler.release_request(request_id))
        return [
            SequenceOutput.failed(
                s.request.request_id, s.index, str(error), refused=refused, error_field=error.field
            )
            for s in ended
        ]

    # -- monitoring ---------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the statistics of queues and cache."""
        scheduler, counts = self.scheduler, self._counts
        self._memory.refresh()
        prefix = scheduler.kv.prefix_cache
        of_addons: dict[str, Any] = {}
        for addon in self._reporters:
            of_addons |= addon.stats()
        return EngineStats(
            step=self._num_steps,
            num_requests=scheduler.num_requests,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
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
            static_batch=scheduler.static_batch,
            **of_addons,
        )

    def check_integrity(self) -> None:
        """Check the accounting of the KV cache and of the add-ons. Raises `IntegrityError`."""
        self.scheduler.check_integrity()
        for addon in self.addons:
            addon.check_integrity(self.scheduler)


def _live(step: Step) -> list[Sequence]:
    return [sequence for sequence in step.sequences if not sequence.released]


def _maybe_scheduled(scheduler: Scheduler) -> list[Sequence]:
    """Return the sequences that may have caused a failure in `schedule`.

    Returns at least one if there is any; otherwise the next step could fail for the same reason forever.
    """
    touched = [*scheduler.running, *(sequence for sequence in scheduler.waiting if sequence.block_table)]
    return touched or list(islice(scheduler.waiting, 1))
