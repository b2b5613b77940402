"""Commands that all workers execute: changes of adapters, and checks of the KV-cache accounting."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from neso.cluster.messages import Tell
from neso.cluster.work_queue import WorkerState
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import (
    CheckIntegrity,
    Event,
    Integrity,
    LoadLora,
    LoraDone,
    LoraNames,
    UnloadLora,
)

logger = logging.getLogger(__name__)

_CATCH_UP = -1
"""Number of changes whose results nobody waits for."""


@dataclass(slots=True)
class _Pending:
    """A command that workers are executing. `waiting`, `done`: names of workers without a result, and with success."""

    command: LoadLora | UnloadLora | CheckIntegrity
    waiting: set[str]
    done: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class CommonCommands:
    """Sends a command to all workers, and emits one event when all have answered or were lost.

    An adapter is loaded by all workers or by none. Workers that join later make the changes so far.

    - workers: the connected workers; send: sends to the worker of this name
    - emit: receives the events; stats: returns the sums over the workers
    """

    def __init__(
        self,
        workers: Callable[[], list[WorkerState]],
        send: Callable[[str, Tell], None],
        emit: Callable[[Event], None],
        stats: Callable[[], EngineStats],
    ) -> None:
        self._workers, self._send, self._emit, self._stats = workers, send, emit, stats
        self._adapters: dict[str, LoadLora | UnloadLora] = {}  # the last change of each
        self._changes: dict[int, _Pending] = {}
        self._check: _Pending | None = None

    def start(self, command: LoadLora | UnloadLora | CheckIntegrity) -> None:
        """Let all workers execute a command."""
        names = {worker.name for worker in self._workers()}
        for name in names:
            self._send(name, Tell(command))
        pending = _Pending(command, names)
        if isinstance(command, CheckIntegrity):
            self._check = pending
            self._finish_check()
        else:
            self._changes[command.number] = pending
            self._finish_change(command.number, pending)

    def catch_up(self, worker: WorkerState) -> None:
        """Let a worker that has joined make the changes of adapters so far."""
        for change in self._adapters.values():
            if isinstance(change, LoadLora) or change.name in worker.loras:
                self._send(worker.name, Tell(msgspec.structs.replace(change, number=_CATCH_UP)))

    def forget(self, name: str) -> None:
        """Do not wait for a lost worker."""
        for number, change in tuple(self._changes.items()):
            change.waiting.discard(name)
            self._finish_change(number, change)
        if self._check is not None:
            self._check.waiting.discard(name)
            self._finish_check()

    def handle(self, worker: WorkerState, event: LoraDone | LoraNames | Integrity) -> None:
        """Process an event of a worker."""
        match event:
            case LoraNames(names):
                worker.loras = names
                merged: dict[str, str | None] = {}
                for one in self._workers():
                    merged |= one.loras
                self._emit(LoraNames(merged))
            case LoraDone(number, error):
                change = self._changes.get(number)
                if change is not None and worker.name in change.waiting:
                    change.waiting.discard(worker.name)
                    change.errors.append(error) if error else change.done.append(worker.name)
                    self._finish_change(number, change)
                elif error:
                    logger.error("worker '%s' could not change an adapter: %s", worker.name, error)
            case Integrity(error, stats):
                worker.stats = stats
                if self._check is not None and worker.name in self._check.waiting:
                    self._check.waiting.discard(worker.name)
                    if error:
                        self._check.errors.append(f"worker '{worker.name}': {error}")
                    self._finish_check()

    def _finish_change(self, number: int, change: _Pending) -> None:
        """Report a change of adapters when all workers have made it; undo it if one could not."""
        if change.waiting or number not in self._changes:
            return
        del self._changes[number]
        command = change.command
        assert not isinstance(command, CheckIntegrity)
        if not change.done and not change.errors:
            change.errors.append("no worker is connected")
        if isinstance(command, UnloadLora):
            if change.done:
                self._adapters[command.name] = command
            error = "" if change.done else change.errors[0]
        else:
            error = change.errors[0] if change.errors else ""
            if error:
                for name in change.done:
                    self._send(name, Tell(UnloadLora(_CATCH_UP, command.lora.name)))
            else:
                self._adapters[command.lora.name] = command
        self._emit(LoraDone(number, error))

    def _finish_check(self) -> None:
        check = self._check
        if check is not None and not check.waiting:
            self._check = None
            self._emit(Integrity(check.errors[0] if check.errors else "", self._stats()))
