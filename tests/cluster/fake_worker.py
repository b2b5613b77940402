"""A worker without an engine: the test grants it credits and says what it generates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from neso.cluster.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Credits,
    Frame,
    Grant,
    Hello,
    Report,
    Tell,
    ToWorker,
    to_worker,
)
from neso.cluster.sockets import WorkerSocket
from neso.engine.core.prefix_keys import BlockChanges
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import EngineInfo
from neso.generation.output import FinishReason

BLOCK = 16
INFO = EngineInfo("native", 4096, 4, 384, 64, BLOCK, 2**20, 0.1)
MODEL = "digest"

T = TypeVar("T")


class FakeWorker:
    """Connects and says hello. `received`: all messages of the front end."""

    def __init__(self, name: str, address: str, token: str | None = None, **hello: Any) -> None:
        self.name = name
        self.received: list[ToWorker] = []
        self.grants: list[Grant] = []
        self._socket = WorkerSocket(name, address, token)
        self._reader = asyncio.create_task(self._read())
        self.hello(**hello)

    def hello(self, **changes: Any) -> None:
        values: dict[str, Any] = {
            "version": PROTOCOL_VERSION,
            "name": self.name,
            "host": "test",
            "pid": 1,
            "model": MODEL,
            "info": INFO,
        }
        self.grants.clear()
        self.send(Hello(**{**values, **changes}))

    def send(self, message: Any) -> None:
        self._socket.send(message)

    def report(self, *frames: Frame, sequences: int = 4, blocks: Sequence[BlockChanges] = ()) -> None:
        """Send outputs, credits for `sequences` more requests, and changes of the prefix cache."""
        credits = Credits(sequences, 1000, 1000, len(self.grants))
        self.send(Report(credits, EngineStats(num_blocks=64), list(frames), list(blocks)))

    def request(self, number: int = -1) -> EngineRequest:
        """Return the request of a grant."""
        return msgspec.msgpack.decode(self.grants[number].request, type=EngineRequest)

    def frame(
        self,
        tokens: list[int],
        start: int = 0,
        *,
        finished: bool = False,
        number: int = -1,
        index: int = 0,
        **values: Any,
    ) -> Frame:
        """Return an output of a granted request."""
        grant = self.grants[number]
        reason = FinishReason.LENGTH if finished else None
        output = SequenceOutput(
            request_id=grant.request_id, index=index, token_ids=tokens, finish_reason=reason, **values
        )
        return Frame(grant.attempt, start, output)

    def commands(self, kind: type[T]) -> list[T]:
        """Return the commands of a kind for its engine."""
        told = [message.command for message in self.received if isinstance(message, Tell)]
        return [command for command in told if isinstance(command, kind)]

    def cancels(self) -> list[Cancel]:
        return [message for message in self.received if isinstance(message, Cancel)]

    async def _read(self) -> None:
        while True:
            message = to_worker.decode(await self._socket.receive())
            self.received.append(message)
            if isinstance(message, Grant):
                self.grants.append(message)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close(linger=0)
