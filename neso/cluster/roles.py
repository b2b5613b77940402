"""Roles that change: moves workers between prefill and decode, by the latencies that clients see.

A role is only which requests a worker gets next. Weights and cache stay, and requests that run are finished.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from neso.cluster.connections import WorkerConnections
from neso.cluster.work_queue import WorkerState, WorkQueue
from neso.engine.cluster_config import DECODE, PREFILL, ClusterConfig, Roles

logger = logging.getLogger(__name__)

PATIENCE = 2
"""Number of consecutive periods in which one side must be too slow, and the other one must have reserves."""
RESERVE = 0.7
"""A side has reserves if its latency is below this part of its target."""


class Pressure(NamedTuple):
    """Latencies in parts of their targets: above 1 is too slow."""

    prefill: float
    decode: float


class RoleChange(NamedTuple):
    worker: WorkerState
    roles: Roles


def pressure(
    workers: Sequence[WorkerState], waiting_tokens: int, ttft_target: float, itl_target: float
) -> Pressure:
    """Return the pressure on both sides.

    Prefill: the time in which the prefill workers can compute the prompts that wait and those that they have. Decode:
    the mean time between two tokens, of the workers that generate. `waiting_tokens`: prompt tokens in the queue.
    """
    prefill = [worker for worker in workers if "prefill" in worker.roles]
    tokens = waiting_tokens + sum(worker.num_prefill_tokens for worker in prefill)
    speed = sum(1 / worker.seconds_per_token for worker in prefill if worker.seconds_per_token)
    generating = [worker.itl for worker in workers if "decode" in worker.roles and worker.jobs]
    itl = sum(generating) / len(generating) if generating else 0.0
    return Pressure(tokens / speed / ttft_target if speed else 0.0, itl / itl_target)


class RoleController:
    """Changes the role of at most one worker per call of `decide`; each role keeps at least one worker."""

    def __init__(self) -> None:
        self._wanted: Roles | None = None
        self._periods = 0

    def decide(self, workers: Sequence[WorkerState], now: Pressure) -> RoleChange | None:
        """Return the change of a role, if there is one; called once per period."""
        wanted: Roles | None = None
        if now.prefill > 1 and now.decode < RESERVE:
            wanted = PREFILL
        elif now.decode > 1 and now.prefill < RESERVE:
            wanted = DECODE
        self._periods = self._periods + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        if wanted is None or self._periods < PATIENCE:
            return None
        other = DECODE if wanted == PREFILL else PREFILL
        givers = [worker for worker in workers if worker.roles == other and worker.info.kv_address]
        if len(givers) < 2:
            return None
        self._periods = 0
        return RoleChange(min(givers, key=lambda worker: worker.num_sequences), wanted)


async def control_roles(
    config: ClusterConfig, connections: WorkerConnections, queue: WorkQueue, changed: Callable[[], None]
) -> None:
    """Change the role of a worker when prefill or decode is too slow; does nothing without targets.

    `changed()` is called after each change.
    """
    if config.ttft_target is None or config.itl_target is None:
        return
    controller = RoleController()
    while True:
        await asyncio.sleep(config.role_period)
        workers = connections.workers
        now = pressure(workers, queue.waiting_tokens, config.ttft_target, config.itl_target)
        change = controller.decide(workers, now)
        if change is not None:
            logger.info(
                "worker '%s' changes from %s to %s: prefill is at %.0f %% of its target, decode at %.0f %%",
                *(change.worker.name, "+".join(change.worker.roles), "+".join(change.roles)),
                *(100 * now.prefill, 100 * now.decode),
            )
            change.worker.roles = change.roles
            changed()
