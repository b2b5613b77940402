"""Worker processes that the server starts on its own host."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable
from typing import Generic, Protocol

import msgspec

from neso.cluster.connections import Connections, H, W, WorkerFailed
from neso.engine.errors import EngineError
from neso.engine.ipc.channel import describe_exit


class NamedOptions(Protocol):
    """Options of a worker process, encoded as JSON."""

    @property
    def name(self) -> str: ...
    @property
    def verbose(self) -> bool: ...


class LocalWorker(Generic[H, W]):
    """A worker process of this host: the module `module` with `options` as JSON. `options` has the worker's name.

    `start` can be called again after it has ended.
    """

    def __init__(self, module: str, options: NamedOptions, connections: Connections[H, W]) -> None:
        self._module, self._options, self._connections = module, options, connections
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._on_dead: list[Callable[[str], None]] = []
        self._stopping = False

    @property
    def name(self) -> str:
        return self._options.name

    def on_dead(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` if the process ends unexpectedly after it has joined."""
        self._on_dead.append(callback)

    async def start(self) -> H:
        """Start the process and wait until it has joined. Returns its first message. Raises `EngineError`."""
        options = msgspec.json.encode(self._options).decode()
        command = (sys.executable, "-m", self._module, options)
        process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE)
        self._process = process
        joining = asyncio.ensure_future(self._connections.joined(self.name))
        ended = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait((joining, ended), return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                # Its last message may still be in transit.
                await asyncio.wait((joining,), timeout=0.5)
            if not joining.done():
                raise EngineError(f"{self.name} has ended ({describe_exit(ended.result())})")
            hello = joining.result()
        except BaseException as error:
            joining.cancel()
            self._kill()
            await ended
            if isinstance(error, WorkerFailed):
                raise EngineError(str(error)) from None
            raise
        self._watching = asyncio.create_task(self._watch(ended))
        return hello

    async def _watch(self, ended: asyncio.Future[int]) -> None:
        reason = f"{self.name} has ended ({describe_exit(await ended)})"
        if self._stopping:
            return
        self._kill()
        self._connections.lost(self.name, reason)
        for callback in self._on_dead:
            callback(reason)

    def kill_if_lost(self) -> None:
        """Kill the process if the front end has given it up, for example because it hangs: it is then restarted."""
        if (
            self._watching is not None
            and not self._watching.done()
            and not self._connections.knows(self.name)
        ):
            self._kill()

    def _kill(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def stop(self, timeout: float) -> None:
        """End the process; kill it after `timeout` seconds."""
        self._stopping = True
        if self._process is None or self._process.returncode is not None:
            return
        if timeout:
            self._process.terminate()
        waiting = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait((waiting,), timeout=timeout)
        finally:
            self._kill()
            await waiting
