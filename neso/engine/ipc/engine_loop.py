"""The engine's side of the channel: commands in, a step, outputs out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import zmq

from neso.engine.core.block_pool import IntegrityError
from neso.engine.core.request import SequenceOutput
from neso.engine.diagnostics.watchdog import StepWatchdog
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
    LoadFailed,
    LoadLora,
    LoraDone,
    LoraNames,
    Shutdown,
    StepOutputs,
    UnloadLora,
    UnreadCommand,
    decode_commands,
    event_encoder,
)
from neso.engine.loop.engine_core import EngineCore
from neso.engine.lora.config import LORA_DISABLED, AdapterError
from neso.engine.lora.manager import LoraManager

logger = logging.getLogger(__name__)


def run_engine(
    socket: zmq.Socket[bytes],
    load: Callable[[], tuple[EngineCore | EncoderCore, EngineInfo]],
    watch: Callable[[EngineCore | EncoderCore], StepWatchdog],
) -> None:
    """Load a model and serve it until `Shutdown`; owns the socket, and closes it at the end."""
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


class EngineLoop:
    """Serves one core; sleeps in the socket when there is nothing to do."""

    def __init__(
        self, socket: zmq.Socket[bytes], core: EngineCore | EncoderCore, watchdog: StepWatchdog
    ) -> None:
        self._socket = socket
        self._core = core
        # Encoders have no adapters.
        self._lora = core.addon(LoraManager) if isinstance(core, EngineCore) else None
        self._lora_revision = 0
        self._watchdog = watchdog

    def run(self) -> None:
        """Until a `Shutdown` comes."""
        while True:
            outputs: list[SequenceOutput] = []
            commands = self._receive()
            for command in commands:
                if isinstance(command, Shutdown):
                    return
                outputs += self._apply(command)
            stepped = self._core.has_work
            if stepped:
                self._watchdog.begin()
                outputs += self._core.step()
                self._watchdog.end()
            self._send_lora_names()
            # An abort or a part of a prompt gives no output, but the server's gauges must not stay where they were.
            if stepped or outputs or commands:
                _send(self._socket, StepOutputs(outputs, self._core.stats()))

    def _receive(self) -> list[Command | UnreadCommand]:
        """All commands that have come; waits for some if there is no work."""
        commands: list[Command | UnreadCommand] = []
        if not self._core.has_work:
            commands += decode_commands(self._socket.recv())
        while True:
            try:
                commands += decode_commands(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return commands

    def _apply(self, command: Command | UnreadCommand) -> list[SequenceOutput]:
        if isinstance(command, UnreadCommand):
            return self._failed(command, f"the engine cannot read it: {command.error}")
        try:
            return self._obey(command)
        except Exception as error:
            # A defect that one command shows is not for the others to suffer from.
            logger.exception("a command failed: %s", type(command).__name__)
            return self._failed(command, f"the engine failed: {error}")

    def _failed(self, command: Command | UnreadCommand, message: str) -> list[SequenceOutput]:
        """Tell who waits for an answer to a command that there is none."""
        match command:
            case Add(request) | UnreadCommand(request) if request.request_id:
                return [SequenceOutput.failed(request.request_id, 0, message)]
            case LoadLora(number) | UnloadLora(number) | UnreadCommand(number=int(number)):
                _send(self._socket, LoraDone(number, message))
        return []

    def _obey(self, command: Command) -> list[SequenceOutput]:
        match command:
            case Add(request):
                return self._core.add(request)
            case Abort(request_id, index):
                self._core.abort(request_id, index)
            case CheckIntegrity():
                _send(self._socket, self._integrity())
            case LoadLora() | UnloadLora():
                self._change_lora(command)
        return []

    def _change_lora(self, command: LoadLora | UnloadLora) -> None:
        lora = self._lora

        def done(message: str) -> None:
            # First the names: whoever is told that it is done may ask for them.
            self._send_lora_names()
            _send(self._socket, LoraDone(command.number, message))

        if lora is None:
            done(LORA_DISABLED)
        elif isinstance(command, UnloadLora):
            done("" if lora.unload(command.name) else f"there is no adapter '{command.name}'")
        else:
            try:
                lora.load(command.lora, lambda error: done(str(error or "")))
            except AdapterError as error:
                done(str(error))

    def _send_lora_names(self) -> None:
        lora = self._lora
        if lora is not None and lora.revision != self._lora_revision:
            self._lora_revision = lora.revision
            _send(self._socket, LoraNames(lora.names()))

    def _integrity(self) -> Integrity:
        try:
            self._core.check_integrity()
        except Exception as error:
            if not isinstance(error, IntegrityError):
                logger.exception("the books could not be checked")
            return Integrity(str(error) or type(error).__name__, self._core.stats())
        return Integrity("", self._core.stats())


def _send(socket: zmq.Socket[bytes], event: Event) -> None:
    # The pair has no high-water mark: it would block only without a peer, and then nobody is left to tell.
    with contextlib.suppress(zmq.Again):
        socket.send(event_encoder.encode(event), zmq.NOBLOCK)
