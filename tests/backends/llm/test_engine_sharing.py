"""`EngineReconnector`: a front-end process connects to engines again, or learns that they stay down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from eventually import until

from neso.backends.llm import engine_sharing
from neso.backends.llm.engine_sharing import EngineReconnector
from neso.engine.client.engine_group import EngineGroup
from neso.engine.errors import EngineDead
from neso.server.errors import Restarting, Unavailable


class Group:
    """Engines whose restarts raise `error`, or succeed if it is None."""

    def __init__(self, count: int) -> None:
        self.engines = tuple(range(count))
        self.error: Exception | None = None
        self.attempts = 0
        self.die: Callable[[int, str], None]

    def on_dead(self, callback: Callable[[int, str], None]) -> None:
        self.die = callback

    async def restart(self, number: int) -> Any:
        self.attempts += 1
        if self.error is not None:
            raise self.error


async def test_engines_that_are_not_restarted_are_down(monkeypatch):
    monkeypatch.setattr(engine_sharing, "RECONNECT_INTERVAL", 0.001)
    group, connected = Group(2), []
    reconnector = EngineReconnector(cast(EngineGroup, group), lambda: connected.append(True))
    for error in (Restarting("in a moment"), EngineDead("it does not answer")):
        group.error, group.attempts = error, 0
        group.die(0, "killed")
        await until(lambda: group.attempts > 2)
        assert not reconnector.down
        await reconnector.stop()
    group.error, group.attempts = Unavailable("it is not restarted"), 0
    group.die(0, "killed")
    await until(lambda: group.attempts > 2)
    assert not reconnector.down, "the other engine serves"
    group.die(1, "killed")
    await until(lambda: reconnector.down)
    group.error = None
    await until(lambda: len(connected) == 2)
    assert not reconnector.down
