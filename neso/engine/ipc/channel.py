"""Client side of the channel to an engine process."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from neso.engine.config import EngineConfig
from neso.engine.diagnostics.watchdog import DEVICE_LOST_STATUS, HANG_STATUS, StepWatchdog
from neso.engine.errors import EngineDead, EngineError
from neso.engine.ipc.engine_process import run_engine
from neso.engine.ipc.heartbeat import HeartbeatReader
from neso.engine.ipc.messages import (
    ONE_PROCESS,
    Command,
    EngineInfo,
    Event,
    Shutdown,
    Unsendable,
    command_encoder,
    event_decoder,
)
from neso.engine.parallel.launcher import launcher_sockets
from neso.engine.placement import visible_devices

logger = logging.getLogger(__name__)


class EngineChannel:
    """A ZeroMQ pair socket to an engine. Commands from one event-loop iteration are sent as one message.

    Must be used on the event loop on which it was created.
    """

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._pending: list[msgspec.Raw] = []
        self._loop = asyncio.get_running_loop()
        self.dead: asyncio.Future[str] = self._loop.create_future()
        """Resolved with the reason when the engine has ended."""

    def send(self, command: Command) -> None:
        """Queue a command; ignored after the end of the engine. Raises `Unsendable`."""
        if self.dead.done():
            return
        try:
            # Encode here and not in `_flush`, so that an error reaches its caller and does not affect other commands.
            encoded = msgspec.Raw(command_encoder.encode(command))
        except (ValueError, TypeError, OverflowError) as error:
            raise Unsendable(str(error)) from None
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(encoded)

    async def receive(self) -> Event:
        """Return the next event of the engine; never returns after the engine has ended, see `dead`."""
        return event_decoder.decode(await self._socket.recv())

    async def receive_first(self) -> Event:
        """Return the first event: `EngineInfo` or `LoadFailed`. Raises `EngineDead`."""
        message = asyncio.ensure_future(self.receive())
        await asyncio.wait((message, self.dead), return_when=asyncio.FIRST_COMPLETED)
        if not message.done():
            # The last message of an ended engine may still be in transit.
            await asyncio.wait((message,), timeout=0.5)
        if message.done():
            self.on_loaded()
            return message.result()
        message.cancel()
        raise EngineDead(self.dead.result())

    def on_loaded(self) -> None:
        """Called when the engine has sent its first event: its model is loaded, or cannot be loaded."""

    async def close(self, timeout: float) -> None:
        """Shut the engine down; kill it after `timeout` seconds."""
        self.send(Shutdown())
        self._flush()
        self._socket.close(linger=1000)

    def _flush(self) -> None:
        commands, self._pending = self._pending, []
        if commands and not self._socket.closed and not self.dead.done():
            # The socket has no high-water mark, so this never blocks.
            self._socket.send(command_encoder.encode(commands))


_NUM_CHECKS = 4
"""Number of consecutive checks without a heartbeat after which an engine hangs. The checks are counted instead of the
time, which also passes while this process is stopped or its event loop is blocked."""


class ProcessChannel(EngineChannel):
    """An engine in its own process, which is killed when it sends no heartbeat for `heartbeat_timeout` seconds.

    While the engine loads its model, the limit is `step_timeout`: importing a library from a slow disk blocks all
    threads of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="neso-"))
        address = f"ipc://{self._directory}/engine"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.bind(address)
        super().__init__(socket)
        self._name = Path(config.model).name
        self._alive, child_end = os.pipe()
        os.set_blocking(self._alive, False)
        self._timeout = config.heartbeat_timeout
        self._heartbeats = HeartbeatReader()
        self._silent_checks = 0
        self._num_clients = 0
        self._hang = ""
        self._timer: asyncio.TimerHandle | None = None
        module = (
            "neso.engine.ipc.engine_process" if config.num_ranks == 1 else "neso.engine.parallel.supervisor"
        )
        command = [
            sys.executable,
            "-m",
            module,
            address,
            str(child_end),
            msgspec.json.encode(config).decode(),
        ]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                pass_fds=(child_end, *launcher_sockets(config)),
                env=_environment(config),
            )
        except OSError:  # too little memory, for example
            os.close(self._alive)
            socket.close(linger=0)
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        finally:
            os.close(child_end)
        if self._timeout and config.step_timeout:
            self._check_later(max(self._timeout, config.step_timeout))
        # The child has the only write end of this pipe, so the read end reports EOF however the child ends.
        self._loop.add_reader(self._alive, self._on_heartbeat)

    def client_address(self) -> str:
        """Return a new address at which another client of the engine can listen."""
        self._num_clients += 1
        return f"ipc://{self._directory}/client-{self._num_clients}"

    async def receive_first(self) -> Event:
        event = await super().receive_first()
        if isinstance(event, EngineInfo):
            for line in event.load_log:
                logger.info("engine of %s: %s", self._name, line)
        return event

    def on_loaded(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._timeout:
            self._check_later(self._timeout)

    async def close(self, timeout: float) -> None:
        await super().close(timeout)
        try:
            await asyncio.wait((self.dead,), timeout=timeout)
        finally:
            if not self.dead.done():
                self.process.kill()
                await asyncio.wait((self.dead,))

    def _on_heartbeat(self) -> None:
        try:
            received = os.read(self._alive, 4096)
        except BlockingIOError:
            return
        if received:
            self._heartbeats.feed(received)
            self._silent_checks = 0
        else:
            self._on_exit()

    def _check_later(self, timeout: float) -> None:
        self._silent_checks = 0
        self._timer = self._loop.call_later(timeout / _NUM_CHECKS, self._check, timeout)

    def _check(self, timeout: float) -> None:
        self._silent_checks += 1
        if self._silent_checks <= _NUM_CHECKS:
            self._timer = self._loop.call_later(timeout / _NUM_CHECKS, self._check, timeout)
            return
        self._hang = f"it did not respond for {timeout:g} s and was killed"
        self.process.kill()

    def _on_exit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._alive)
        os.close(self._alive)
        code = self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        self.dead.set_result(
            f"the engine process has ended ({self._heartbeats.reason or self._hang or describe_exit(code)})"
        )


def _environment(config: EngineConfig) -> dict[str, str]:
    """Return the environment of an engine process: its GPUs are `device_ids`."""
    if config.device_ids is None:
        return dict(os.environ)
    return {**os.environ, "CUDA_VISIBLE_DEVICES": visible_devices(config.device_ids)}


def describe_exit(code: int) -> str:
    """Return how a process has ended, from its exit status or, if negative, its signal."""
    if code == HANG_STATUS:
        return "a step took longer than step_timeout"
    if code == DEVICE_LOST_STATUS:
        return "its GPU failed"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


class ThreadChannel(EngineChannel):
    """An engine in a thread of this process, for tests, with the same loop and messages."""

    def __init__(self, config: EngineConfig) -> None:
        context = zmq.asyncio.Context.instance()
        address = f"inproc://engine-{id(self)}"
        socket = context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.bind(address)
        super().__init__(socket)
        engine_socket = zmq.Context(context).socket(zmq.PAIR)
        engine_socket.set_hwm(0)
        engine_socket.connect(address)
        self._thread = threading.Thread(target=self._run, args=(engine_socket, config), daemon=True)
        self._thread.start()

    async def close(self, timeout: float) -> None:
        await super().close(timeout)
        await asyncio.shield(self.dead)

    def _run(self, socket: zmq.Socket[bytes], config: EngineConfig) -> None:
        from neso.engine.load.loader import load_engine

        try:
            # A thread cannot be killed: a hanging step is only logged.
            run_engine(
                socket,
                lambda: load_engine(config),
                lambda core: StepWatchdog(core, config, on_hang=lambda: None),
            )
        finally:
            self._loop.call_soon_threadsafe(self.dead.set_result, "the engine's thread has ended")


def open_channel(config: EngineConfig, *, in_process: bool) -> EngineChannel:
    """Start an engine; see `EngineChannel.receive_first`. Raises `EngineError` for ranks in this process."""
    if in_process and config.num_ranks > 1:
        raise EngineError(ONE_PROCESS)
    return ThreadChannel(config) if in_process else ProcessChannel(config)
