"""Engines shared by several server processes: the server process starts them, front-end processes connect to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.engine_client import load_engine_tokenizer
from neso.engine.client.engine_group import EngineGroup
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.server.errors import Restarting, ServerError

RECONNECT_INTERVAL = 0.25
"""Seconds between two attempts to connect to an engine that the server process restarts."""


@dataclass(frozen=True, slots=True)
class EngineShare:
    """Configurations by which a front-end process connects to the engines of a model.

    `config`: options of the model; `engines`: options of each engine.
    """

    config: EngineConfig
    engines: tuple[EngineConfig, ...]

    @classmethod
    def of(cls, group: EngineGroup, config: EngineConfig) -> EngineShare | None:
        """Return the share of engines in processes; None for engines in threads of the server."""
        if not all(engine.can_be_attached for engine in group.engines):
            return None
        return cls(config, tuple(engine.config for engine in group.engines))

    async def connect(self, attach: Callable[..., Any]) -> EngineGroup:
        """Connect to the engines. `attach(number, ...)` is an `Attachment`. Raises `EngineError`, `ServerError`.

        With several engines, each process has a queue of its own, and chooses the engines by its own requests.
        """
        tokenizer = asyncio.ensure_future(asyncio.to_thread(load_engine_tokenizer, self.config))
        engines = await asyncio.gather(
            *(
                AsyncEngine.connect(config, partial(attach, number), tokenizer)
                for number, config in enumerate(self.engines)
            )
        )
        return EngineGroup(engines, self.config)


class EngineReconnector:
    """Connects a front-end process to each engine again after the server process has restarted it.

    `reconnected` is called afterwards.
    """

    def __init__(self, group: EngineGroup, reconnected: Callable[[], None]) -> None:
        self._group = group
        self._reconnected = reconnected
        self._tasks: set[asyncio.Task[None]] = set()
        self._down: set[int] = set()
        group.on_dead(self._on_dead)

    @property
    def down(self) -> bool:
        """Whether the server process has said of all engines that it does not restart them."""
        return len(self._down) == len(self._group.engines)

    async def stop(self) -> None:
        """Stop connecting."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_dead(self, number: int, reason: str) -> None:
        task = asyncio.get_running_loop().create_task(self._reconnect(number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reconnect(self, number: int) -> None:
        while True:
            try:
                await self._group.restart(number)
                break
            except EngineError:
                pass
            except ServerError as error:
                if not isinstance(error, Restarting):
                    self._down.add(number)
            await asyncio.sleep(RECONNECT_INTERVAL)
        self._down.discard(number)
        self._reconnected()
