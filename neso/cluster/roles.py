"""Roles that change: moves workers between prefill, decode and both, by the latencies that the load will have.

A role is only which requests a worker gets next. Weights and cache stay, and requests that run are finished.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from neso.cluster.connections import WorkerConnections
from neso.cluster.work_queue import WorkerState, WorkQueue
from neso.engine.cluster_config import DECODE, MIXED, PREFILL, ClusterConfig, Roles

logger = logging.getLogger(__name__)

PATIENCE = 2
"""Number of consecutive periods in which the same change must be wanted."""
GAIN = 0.1
"""A change must reduce the predicted pressure by this part."""
RESERVE = 0.8
"""Below this part of the targets, nothing changes."""
_NEWER = 0.7
"""Weight of the last period in the measured demand."""
_OVERLOAD_SECONDS = 30.0
"""Time during which an overloaded side is expected to stay so: its queue grows as long."""


class Split(NamedTuple):
    """Number of workers by role."""

    prefill: int
    mixed: int
    decode: int


class Pressure(NamedTuple):
    """Latencies in parts of their targets: above 1 is too slow."""

    ttft: float
    itl: float


class RoleChange(NamedTuple):
    worker: WorkerState
    roles: Roles


@dataclass(frozen=True, slots=True)
class Demand:
    """What clients ask for, and how fast workers are: all that the latencies of a split are predicted from.

    - prompt_tokens: to compute per second, without cached ones; output_tokens: to generate per second
    - prompt_length: mean number of tokens to compute of a prompt; backlog: prompt tokens that wait for a worker
    - max_sequences: of a worker
    - seconds_per_token: of a prefill; step, per_sequence: seconds between two tokens = step + per_sequence * sequences
    """

    prompt_tokens: float
    output_tokens: float
    prompt_length: float
    backlog: float
    seconds_per_token: float
    step: float
    per_sequence: float
    max_sequences: float = float("inf")

    @property
    def output_length(self) -> float:
        """Mean number of output tokens of a request."""
        return self.output_tokens * self.prompt_length / self.prompt_tokens if self.prompt_tokens else 0.0

    def pressure(self, split: Split, config: ClusterConfig) -> Pressure:
        """Predict the latencies of a split.

        The router gives decode workers the prompts that prefill workers cannot compute in time, see `remote_pays`. So
        the part of the prompts that they compute is the one with the least pressure. A worker of both roles counts half
        for each, except if all are: they compute all prompts where they decode.
        """
        if not split.prefill and not split.decode:
            return self._pressure(0.0, split.mixed, 1.0, config)
        prefill, decode = split.prefill + split.mixed / 2, split.decode + split.mixed / 2
        parts = (number / 10 for number in range(11))
        return min((self._pressure(prefill, decode, part, config) for part in parts), key=max)

    def _pressure(self, prefill: float, decode: float, local: float, config: ClusterConfig) -> Pressure:
        """Predict the latencies if decode workers compute a part of the prompts, `local` of 1."""
        busy = self.prompt_tokens * self.seconds_per_token  # number of workers that prefill all the time
        prompt = self.prompt_length * self.seconds_per_token
        backlog = self.backlog * self.seconds_per_token
        ttft = 0.0
        if local < 1:
            ttft = prompt + _wait(prompt, busy * (1 - local) / prefill) + backlog * (1 - local) / prefill
        sequences = self.output_tokens * self.per_sequence / decode
        itl = self.step / (1 - sequences) if sequences < 0.95 else self.step * (20 + 100 * (sequences - 0.95))
        waiting = self.output_tokens * itl / decode / self.max_sequences - 1  # of those that find no place
        ttft += max(0.0, waiting) * _OVERLOAD_SECONDS
        if local:
            load = busy * local / decode
            own = prompt + self.step  # the steps have tokens of other requests too
            ttft = max(ttft, own + _wait(own, load) + backlog * local / decode)
            # Of short outputs, those that meet one prompt are delayed by more than the mean.
            one_prompt = prompt / self.output_length if self.output_length else 0.0
            itl = max(itl / max(0.05, 1 - load), itl + one_prompt)
        assert config.ttft_target is not None and config.itl_target is not None
        return Pressure(ttft / config.ttft_target, itl / config.itl_target)


def _wait(prompt: float, load: float) -> float:
    """Return the mean seconds in a queue of prompts. `prompt`: seconds of one; `load`: of the workers, 1 is all.

    Overloaded workers are slower the more they are overloaded, so that splits can be compared.
    """
    if load < 0.95:
        return prompt * load / 2 / (1 - load)
    return 10 * prompt + (load - 0.95) * _OVERLOAD_SECONDS


class DemandMeter:
    """Measures the demand once per period; earlier periods count less and less."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue
        self._before = replace(queue.totals)
        self._prompt_tokens = self._output_tokens = self._outputs = self._prompts = 0.0

    def measure(self, workers: Sequence[WorkerState], seconds: float) -> Demand:
        """Return the demand. `seconds`: since the last call."""
        totals = self._queue.totals
        new, self._before = totals.since(self._before), replace(totals)
        computed = new.computed_tokens / new.granted_tokens if new.granted_tokens else 1.0
        self._prompt_tokens += _NEWER * (new.arrived_tokens * computed / seconds - self._prompt_tokens)
        self._prompts += _NEWER * (new.arrived / seconds - self._prompts)
        if new.finished:
            length = new.output_tokens / new.finished
            self._outputs += (_NEWER if self._outputs else 1) * (length - self._outputs)
        running = [job for worker in workers for job in worker.jobs.values() if job.delivered.any]
        # Long outputs are seen before they end.
        so_far = sum(job.delivered.num_tokens for job in running) / len(running) if running else 0.0
        waiting = self._queue.waiting_tokens + sum(worker.num_prefill_tokens for worker in workers)
        prefills = [worker.seconds_per_token for worker in workers if worker.seconds_per_token]
        decodes = [line for worker in workers if (line := worker.decode_speed.line())]
        step, slope = (
            (sum(column) / len(decodes) for column in zip(*decodes, strict=True)) if decodes else (0.0, 0.0)
        )
        return Demand(
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._prompts * max(self._outputs, so_far),
            prompt_length=self._prompt_tokens / self._prompts if self._prompts else 0.0,
            backlog=max(0.0, waiting - self._prompt_tokens * seconds),
            seconds_per_token=sum(prefills) / len(prefills) if prefills else 0.0,
            step=step,
            per_sequence=slope,
            max_sequences=sum(worker.info.max_num_seqs for worker in workers) / max(1, len(workers)),
        )


class RoleController:
    """Changes the role of at most one worker per call of `decide`."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._wanted: tuple[Roles, Roles] | None = None  # a change from the first to the second
        self._periods = 0

    def decide(self, workers: Sequence[WorkerState], demand: Demand) -> RoleChange | None:
        """Return the next change towards the best split, if there is one; called once per period."""
        movable = [worker for worker in workers if worker.info.kv_address]
        counts = Counter(worker.roles for worker in movable)
        now = Split(counts[PREFILL], counts[MIXED], counts[DECODE])
        best = self._best(now, demand) if len(movable) > 1 and demand.seconds_per_token else None
        if best is None:
            self._wanted = None
            return None
        change = zip((PREFILL, MIXED, DECODE), now, best, strict=True)
        surplus = {roles: has - wanted for roles, has, wanted in change}
        wanted = (
            max(surplus, key=lambda roles: surplus[roles]),
            min(surplus, key=lambda roles: surplus[roles]),
        )
        self._periods = self._periods + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        if self._periods < PATIENCE:
            return None
        givers = [worker for worker in movable if worker.roles == wanted[0]]
        return RoleChange(min(givers, key=lambda worker: worker.num_sequences), wanted[1])

    def _best(self, now: Split, demand: Demand) -> Split | None:
        """Return the split with the least pressure; None if it gains too little.

        Workers of both roles are the choice only if no other split meets both targets.
        """

        def worst(split: Split) -> float:
            return max(demand.pressure(split, self._config))

        count = sum(now)
        best = min((Split(number, 0, count - number) for number in range(1, count)), key=worst)
        mixed = Split(0, count, 0)
        if worst(best) > 1 and worst(mixed) < (1 - GAIN) * worst(best):
            best = mixed
        present = worst(now)
        return best if present > RESERVE and worst(best) < (1 - GAIN) * present else None


async def control_roles(
    config: ClusterConfig, connections: WorkerConnections, queue: WorkQueue, changed: Callable[[], None]
) -> None:
    """Change the role of a worker when prefill or decode will be too slow; does nothing without targets.

    `changed()` is called after each change.
    """
    if config.ttft_target is None or config.itl_target is None:
        return
    controller, meter = RoleController(config), DemandMeter(queue)
    while True:
        await asyncio.sleep(config.role_period)
        workers = connections.workers
        demand = meter.measure(workers, config.role_period)
        change = controller.decide(workers, demand)
        if change is not None:
            logger.info(
                "worker '%s' changes from %s to %s: %.0f prompt and %.0f output tokens per second, %.0f wait",
                *(change.worker.name, "+".join(change.worker.roles), "+".join(change.roles)),
                *(demand.prompt_tokens, demand.output_tokens, demand.backlog),
            )
            change.worker.roles = change.roles
            changed()
