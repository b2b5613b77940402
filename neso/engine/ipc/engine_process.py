"""Engine process: `python -m neso.engine.ipc.engine_process ADDRESS HEARTBEAT_FD CONFIG_JSON` runs one engine.

Standard input is a pipe whose write end is held by the client; this process exits when it is closed. HEARTBEAT_FD is
the write end of a pipe whose other end the client reads, see `Heartbeat`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from neso.engine.config import EngineConfig
from neso.engine.core.block_pool import IntegrityError
from neso.engine.core.request import SequenceOutput
from neso.engine.diagnostics.watchdog import HANG_STATUS, StepWatchdog
from neso.engine.encoders.encoder_core import EncoderCore
from neso.engine.errors import EngineError
from neso.engine.ipc.messages import (
    Abort,
    Add,
    CheckIntegrity,
    Command,
    EngineInfo,
    Event,
    Integrity,
    InvalidCommand,
    LoadFailed,
    LoadLora,
    LoraDone,
    LoraNames,
    Shutdown,
    StepOutputs,
    UnloadLora,
    decode_commands,
    event_encoder,
)
from neso.engine.loop.engine_core import EngineCore
from neso.engine.lora.config import LORA_DISABLED, AdapterError
from neso.engine.lora.manager import LoraManager

logger = logging.getLogger(__name__)

Core = EngineCore | EncoderCore


class EngineService:
    """Applies commands to an engine core. Outputs are returned, other events are passed to `emit`."""

    def __init__(self, core: Core, emit: Callable[[Event], None]) -> None:
        self.core = core
        self._emit = emit
        self._lora = (
            core.addon(LoraManager) if isinstance(core, EngineCore) else None
        )  # encoders do not support adapters
        self._lora_revision = 0

    def step(self) -> list[SequenceOutput]:
        """Run one step of the core."""
        outputs = self.core.step()
        self._emit_lora_names()
        return outputs

    def apply(self, command: Command | InvalidCommand) -> list[SequenceOutput]:
        """Apply a command. An error is reported to the sender and does not affect other requests."""
        if isinstance(command, InvalidCommand):
            return self._fail(command, f"the engine cannot read it: {command.error}")
        try:
            match command:
                case Add(request):
                    return self.core.add(request)
                case Abort(request_id, index):
                    self.core.abort(request_id, index)
                case CheckIntegrity():
                    self._emit(self._check_integrity())
                case LoadLora() | UnloadLora():
                    self._change_lora(command)
            return []
        except Exception as error:
            logger.exception("a command failed: %s", type(command).__name__)
            return self._fail(command, f"the engine failed: {error}")
        finally:
            self._emit_lora_names()

    def _fail(self, command: Command | InvalidCommand, message: str) -> list[SequenceOutput]:
        """Report a failed command to the sender."""
        match command:
            case Add(request) | InvalidCommand(request) if request.request_id:
                return [SequenceOutput.failed(request.request_id, 0, message)]
            case LoadLora(number) | UnloadLora(number) | InvalidCommand(number=int(number)):
                self._emit(LoraDone(number, message))
        return []

    def _change_lora(self, command: LoadLora | UnloadLora) -> None:
        lora = self._lora

        def done(message: str) -> None:
            # Send the names first, because the client can use the adapter as soon as it receives `LoraDone`.
            self._emit_lora_names()
            self._emit(LoraDone(command.number, message))

        if lora is None:
            done(LORA_DISABLED)
        elif isinstance(command, UnloadLora):
            done("" if lora.unload(command.name) else f"there is no adapter '{command.name}'")
        else:
            try:
                lora.load(command.lora, lambda error: done(str(error or "")))
            except AdapterError as error:
                done(str(error))

    def _emit_lora_names(self) -> None:
        lora = self._lora
        if lora is not None and lora.revision != self._lora_revision:
            self._lora_revision = lora.revision
            self._emit(LoraNames(lora.names()))

    def _check_integrity(self) -> Integrity:
        try:
            self.core.check_integrity()
        except Exception as error:
            if not isinstance(error, IntegrityError):
                logger.exception("checking the KV-cache accounting failed")
            return Integrity(str(error) or type(error).__name__, self.core.stats())
        return Integrity("", self.core.stats())


class EngineLoop:
    """Receives commands, runs steps and sends events. Blocks in the socket when there is no work."""

    def __init__(self, socket: zmq.Socket[bytes], core: Core, watchdog: StepWatchdog) -> None:
        self._socket = socket
        self._service = EngineService(core, lambda event: _send(socket, event))
        self._watchdog = watchdog

    def run(self) -> None:
        """Run until a `Shutdown` command."""
        core = self._service.core
        while True:
            outputs: list[SequenceOutput] = []
            commands = self._receive(block=not core.has_work)
            self._watchdog.begin()
            for command in commands:
                if isinstance(command, Shutdown):
                    return
                outputs += self._service.apply(command)
            stepped = core.has_work
            if stepped:
                outputs += self._service.step()
            self._watchdog.end()
            # Send statistics even without outputs, after an abort or a prefill chunk, so that the client's are current.
            if stepped or outputs or commands:
                _send(self._socket, StepOutputs(outputs, core.stats()))

    def _receive(self, *, block: bool) -> list[Command | InvalidCommand]:
        """Return all pending commands."""
        commands = list(decode_commands(self._socket.recv())) if block else []
        while True:
            try:
                commands += decode_commands(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return commands


def _send(socket: zmq.Socket[bytes], event: Event) -> None:
    # Without a high-water mark, sending blocks only without a peer; the event is then not needed.
    with contextlib.suppress(zmq.Again):
        socket.send(event_encoder.encode(event), zmq.NOBLOCK)


def run_engine(
    socket: zmq.Socket[bytes],
    load: Callable[[], tuple[Core, EngineInfo]],
    watch: Callable[[Core], StepWatchdog],
) -> None:
    """Load a model and serve it until `Shutdown`. Closes the socket."""
    try:
        try:
            core, info = load()
        except EngineError as error:
            _send(socket, LoadFailed(str(error)))
            return
        except Exception as error:
            logger.exception("loading the model failed")
            _send(socket, LoadFailed(f"{type(error).__name__}: {error}"))
            return
        _send(socket, info)
        watchdog = watch(core)
        try:
            EngineLoop(socket, core, watchdog).run()
        finally:
            watchdog.close()
    finally:
        socket.close(linger=1000)


class Heartbeat:
    """A thread that regularly writes a byte to a pipe, as long as this process runs and its threads get the GIL.

    The client kills a process that is silent for `heartbeat_timeout` seconds. A thread, because the main thread writes
    nothing during a step, which may be long.
    """

    def __init__(self, fd: int, timeout: float) -> None:
        os.set_inheritable(fd, False)  # the client detects the end of this process by the end of the pipe
        os.set_blocking(fd, False)
        self._fd, self._interval = fd, heartbeat_interval(timeout)
        if timeout:
            threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def _run(self) -> None:
        while True:
            with contextlib.suppress(BlockingIOError):  # a stopped client does not read
                os.write(self._fd, b".")
            time.sleep(self._interval)


def heartbeat_interval(timeout: float) -> float:
    """Return the seconds between two heartbeats."""
    return min(1.0, timeout / 8)


def main(address: str, heartbeat_fd: str, config_json: str) -> None:
    """Connect to the client and serve one model to it."""
    from neso.engine.load.loader import load_engine

    # Ctrl-C is sent to the whole process group; the client decides when its engines end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True, name="parent-watch").start()
    config = msgspec.json.decode(config_json, type=EngineConfig)
    Heartbeat(int(heartbeat_fd), config.heartbeat_timeout)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)
    # A hanging step cannot be interrupted. The process exits; the client detects this and fails its requests.
    run_engine(
        socket,
        lambda: load_engine(config),
        lambda core: StepWatchdog(core, config, on_hang=lambda: os._exit(HANG_STATUS)),
    )
    context.term()


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
