"""Engine process: `python -m neso.engine.ipc.engine_process ADDRESS HEARTBEAT_FD CONFIG_JSON` runs one engine.

Standard input is a pipe whose write end is held by the client; this process exits when it is closed. HEARTBEAT_FD is
the write end of a pipe whose other end the client reads, see `Heartbeat`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

import msgspec
import zmq

from neso.engine.config import EngineConfig
from neso.engine.core.block_pool import IntegrityError
from neso.engine.core.request import SequenceOutput
from neso.engine.diagnostics.watchdog import DEVICE_LOST_STATUS, HANG_STATUS, StepWatchdog
from neso.engine.encoders.encoder_core import EncoderCore
from neso.engine.errors import EngineError
from neso.engine.host_resources import parse_cpu_list
from neso.engine.ipc.clients import EngineClients
from neso.engine.ipc.heartbeat import Heartbeat
from neso.engine.ipc.messages import (
    Abort,
    Add,
    Attach,
    CheckIntegrity,
    Command,
    Detach,
    EngineInfo,
    Event,
    ExtendLease,
    Integrity,
    InvalidCommand,
    LoadFailed,
    LoadLora,
    LoraDone,
    LoraNames,
    ReleaseLease,
    SendBlockKeys,
    Shutdown,
    UnloadLora,
    client_of,
)
from neso.engine.kv_transfer.addon import KvTransfer
from neso.engine.loop.engine_core import EngineCore
from neso.engine.lora.config import LORA_DISABLED, AdapterError
from neso.engine.lora.manager import LoraManager

logger = logging.getLogger(__name__)

Core = EngineCore | EncoderCore


class EngineService:
    """Applies commands to an engine core.

    Outputs are returned. Other events are passed to `emit`, and those for all clients to `emit_to_all`.
    """

    def __init__(
        self, core: Core, emit: Callable[[Event], None], emit_to_all: Callable[[Event], None]
    ) -> None:
        self.core = core
        self._emit = emit
        self._emit_to_all = emit_to_all
        self._lora = (
            core.addon(LoraManager) if isinstance(core, EngineCore) else None
        )  # encoders do not support adapters
        self._lora_revision = 0

    def step(self) -> list[SequenceOutput]:
        """Run one step of the core."""
        outputs = self.core.step()
        self._emit_lora_names()
        return outputs

    def emit_block_changes(self) -> None:
        """Send the changes of the prefix cache, if a client has asked for them."""
        if isinstance(self.core, EngineCore):
            changes = self.core.scheduler.kv.prefix_cache.take_changes()
            if changes is not None:
                self._emit(changes)

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
                case ExtendLease() | ReleaseLease():
                    self._change_lease(command)
                case SendBlockKeys() if isinstance(self.core, EngineCore):
                    self._emit(self.core.scheduler.kv.prefix_cache.all_keys())
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

    def _change_lease(self, command: ExtendLease | ReleaseLease) -> None:
        transfer = self.core.addon(KvTransfer) if isinstance(self.core, EngineCore) else None
        if transfer is None:
            return
        if isinstance(command, ExtendLease):
            transfer.extend_lease(command.transfer_id, command.lease_seconds)
        else:
            transfer.release_lease(command.transfer_id)

    def _emit_lora_names(self) -> None:
        lora = self._lora
        if lora is not None and lora.revision != self._lora_revision:
            self._lora_revision = lora.revision
            self._emit_to_all(LoraNames(lora.names()))

    def lora_names(self) -> list[Event]:
        """Return the event with the loaded adapters."""
        return [] if self._lora is None else [LoraNames(self._lora.names())]

    def abort_all(self, client: int) -> None:
        """Abort the requests of a client."""
        for request_id in self.core.request_ids():
            if client_of(request_id) == client:
                self.core.abort(request_id)

    def _check_integrity(self) -> Integrity:
        try:
            self.core.check_integrity()
        except Exception as error:
            if not isinstance(error, IntegrityError):
                logger.exception("checking the KV-cache accounting failed")
            return Integrity(str(error) or type(error).__name__, self.core.stats())
        return Integrity("", self.core.stats())


class DeviceLost(Exception):
    """A step has failed in such a way that no further one can run in this process."""


class EngineLoop:
    """Receives commands, runs steps and sends events. Blocks in the socket when there is no work."""

    def __init__(self, clients: EngineClients, core: Core, info: EngineInfo, watchdog: StepWatchdog) -> None:
        self._clients = clients
        self._info = info
        self._service = EngineService(core, clients.send, clients.send_all)
        self._watchdog = watchdog
        if isinstance(core, EngineCore):
            core.set_wake(clients.wake_up.set)

    def run(self) -> None:
        """Run until a `Shutdown` command. Raises `DeviceLost`."""
        core = self._service.core
        while True:
            outputs: list[SequenceOutput] = []
            commands = self._clients.receive(block=not core.has_work)
            self._watchdog.begin()
            for command in commands:
                if isinstance(command, Shutdown):
                    return
                if isinstance(command, Attach | Detach):
                    self._change_clients(command)
                else:
                    outputs += self._service.apply(command)
            stepped = core.has_work
            if stepped:
                outputs += self._service.step()
            self._watchdog.end()
            self._service.emit_block_changes()
            # Send statistics even without outputs, after an abort or a prefill chunk, so that the client's are current.
            if stepped or outputs or commands:
                self._clients.send_step(outputs, core.stats())
            if core.lost_device:
                raise DeviceLost

    def _change_clients(self, command: Attach | Detach) -> None:
        self._service.abort_all(command.client)
        if isinstance(command, Attach):
            self._clients.attach(command, self._info, *self._service.lora_names())
        else:
            self._clients.detach(command.client)


def run_engine(
    socket: zmq.Socket[bytes],
    load: Callable[[], tuple[Core, EngineInfo]],
    watch: Callable[[Core], StepWatchdog],
) -> None:
    """Load a model and serve it until `Shutdown`. Closes the socket. Raises `DeviceLost`."""
    clients = EngineClients(socket)
    try:
        try:
            core, info = load()
        except EngineError as error:
            clients.send(LoadFailed(str(error)))
            return
        except Exception as error:
            logger.exception("loading the model failed")
            clients.send(LoadFailed(f"{type(error).__name__}: {error}"))
            return
        clients.send(info)
        watchdog = watch(core)
        try:
            EngineLoop(clients, core, info, watchdog).run()
        finally:
            watchdog.close()
            if isinstance(core, EngineCore):
                core.close()
    finally:
        clients.close()


class LoadLog(logging.Handler):
    """Collects the information that is logged while a model is loaded, because only the server knows where logs go."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno > logging.INFO:  # errors are shown at once, also if loading fails
            assert logging.lastResort is not None
            logging.lastResort.handle(record)
        else:
            self.lines.append(record.getMessage())


def with_load_log(load: Callable[[], tuple[Core, EngineInfo]]) -> tuple[Core, EngineInfo]:
    """Load a model in a process of its own; what is logged becomes `EngineInfo.load_log`."""
    neso, log = logging.getLogger("neso"), LoadLog()
    level = neso.level
    neso.addHandler(log)
    neso.setLevel(logging.INFO)
    try:
        core, info = load()
    finally:
        neso.setLevel(level)
        neso.removeHandler(log)
    return core, msgspec.structs.replace(info, load_log=tuple(log.lines))


def main(address: str, heartbeat_fd: str, config_json: str) -> None:
    """Connect to the client and serve one model to it."""
    from neso.engine.load.loader import load_engine

    # Ctrl-C is sent to the whole process group; the client decides when its engines end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(config_json, type=EngineConfig)
    if config.cpus is not None:  # before threads start, because they inherit it
        os.sched_setaffinity(0, parse_cpu_list(config.cpus))
    threading.Thread(target=_exit_with_parent, daemon=True, name="parent-watch").start()
    Heartbeat(int(heartbeat_fd), config.heartbeat_timeout)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)
    # A hanging step cannot be interrupted. The process exits; the client detects this and fails its requests.
    try:
        run_engine(
            socket,
            lambda: with_load_log(lambda: load_engine(config)),
            lambda core: StepWatchdog(core, config, on_hang=lambda: os._exit(HANG_STATUS)),
        )
    except DeviceLost:
        logger.critical("the device is lost; the engine process ends")
        os._exit(DEVICE_LOST_STATUS)
    context.term()


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
