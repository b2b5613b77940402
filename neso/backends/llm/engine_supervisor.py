"""Restarts the engines of a model when they end unexpectedly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from prometheus_client import Counter

from neso.backends.restarts import Restarts
from neso.engine.config import EngineConfig
from neso.engine.ipc.messages import EngineInfo

logger = logging.getLogger(__name__)


class Restartable(Protocol):
    """Engines that are restarted one by one: an `EngineGroup`, or the workers of this host."""

    @property
    def engines(self) -> Sequence[object]: ...

    def on_dead(self, callback: Callable[[int, str], None]) -> None:
        """Call `callback(number, reason)` when an engine ends unexpectedly, before requests fail because of it."""

    async def restart(self, number: int) -> EngineInfo:
        """Start an engine again. Raises `EngineError`."""
        ...


class EngineSupervisor:
    """Restarts each engine of a group by itself, with its own delay and its own limit of failures.

    `restarted` is called with the properties of a restarted engine, `lost` when one cannot be restarted because its
    ranks were started by mpirun or srun.
    """

    def __init__(
        self,
        model: str,
        group: Restartable,
        config: EngineConfig,
        counter: Counter,
        restarted: Callable[[EngineInfo], None],
        lost: Callable[[str], None],
    ) -> None:
        self._model, self._group, self._restarted = model, group, restarted
        # A launcher has started the ranks, and only it can start them again.
        self._lost = None if config.rank_address is None else lost
        self._restarting: dict[int, asyncio.Task[None]] = {}
        self._down: set[int] = set()  # engines that have failed too often
        self._restarts = [
            Restarts(config.max_restarts, counter, config.restart_window) for _ in group.engines
        ]
        group.on_dead(self._on_dead)

    @property
    def down(self) -> bool:
        """Whether all engines have failed too often and are not restarted."""
        return 0 < len(self._group.engines) == len(self._down)

    async def stop(self) -> None:
        """Stop restarting."""
        # A loop, because a restarted engine can end while this waits, which begins another restart.
        while tasks := [task for task in self._restarting.values() if not task.done()]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _on_dead(self, number: int, reason: str) -> None:
        logger.error("%s: %s", self._name(number), reason)
        if self._lost is not None:
            self._down.add(number)
            self._lost(f"{self._name(number)}: {reason}")
            return
        restarts = self._restarts[number]
        restarts.record_failure()
        if restarts.exhausted:
            self._give_up(number)
            return
        restart = self._restart(number, restarts)
        self._restarting[number] = asyncio.get_running_loop().create_task(restart)

    async def _restart(self, number: int, restarts: Restarts) -> None:
        name = self._name(number)

        def failed(error: Exception) -> None:
            logger.error("%s: the engine could not be restarted: %s", name, error)

        info = await restarts.restart(partial(self._group.restart, number), failed)
        if info is None:
            self._give_up(number)
            return
        self._restarted(info)

    def _give_up(self, number: int) -> None:
        self._down.add(number)
        logger.critical("%s: the engine has failed too often and is not restarted", self._name(number))

    def _name(self, number: int) -> str:
        suffix = f", engine {number}" if len(self._group.engines) > 1 else ""
        return f"model '{self._model}'{suffix}"
