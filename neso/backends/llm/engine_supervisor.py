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


class Watched(Protocol):
    """An engine, or a process that contains one."""

    def on_dead(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` if it ends unexpectedly."""


class Restartable(Protocol):
    """Engines that are restarted one by one: an `EngineGroup`, or the workers of this host."""

    @property
    def engines(self) -> Sequence[Watched]: ...

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
        for number, engine in enumerate(group.engines):
            restarts = Restarts(config.max_restarts, counter, config.restart_window)
            engine.on_dead(partial(self._on_dead, number, restarts))

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

    def _on_dead(self, number: int, restarts: Restarts, reason: str) -> None:
        logger.error("%s: %s", self._name(number), reason)
        if self._lost is not None:
            self._down.add(number)
            self._lost(f"{self._name(number)}: {reason}")
            return
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
