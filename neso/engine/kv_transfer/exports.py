"""Exports of an engine: which blocks are computed, and until when they are kept."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from neso.engine.core.kv_manager import BlockHold
from neso.engine.kv_transfer.protocol import Ended, Progress

_MAX_ENDED = 4096
"""Number of ended exports whose reason is remembered."""


@dataclass(slots=True, eq=False)
class Export:
    """The blocks of one request. `hold`, `deadline`: set when the request has ended and the lease begins."""

    transfer_id: str
    num_tokens: int = 0
    digest: bytes = b""
    blocks: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    hold: BlockHold | None = None
    deadline: float | None = None
    released: bool = False


class ExportTable:
    """The exports by transfer id. Written by the engine thread, read by the KV server's thread.

    An export begins with its request. While the request runs, its sequence holds the blocks; then the lease does, until
    it is released or its time is over. `notify` is called after every change.
    """

    def __init__(
        self, notify: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._notify = notify
        self._clock = clock
        self._lock = threading.Lock()
        self._exports: dict[str, Export] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # reasons
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._exports)

    def begin(self, transfer_id: str) -> Export:
        """Add an export. Raises `ValueError` if its id is in use."""
        with self._lock:
            if transfer_id in self._exports:
                raise ValueError(f"transfer id '{transfer_id}' is in use")
            self._ended.pop(transfer_id, None)
            self._exports[transfer_id] = export = Export(transfer_id)
            return export

    def publish(self, export: Export, blocks: list[int], epochs: list[int]) -> None:
        """Set the blocks that are computed so far."""
        with self._lock:
            export.blocks, export.epochs = blocks, epochs
        self._notify()

    def complete(self, export: Export, hold: BlockHold, lease_seconds: float) -> None:
        """Begin the lease: all blocks are computed, and held by `hold`."""
        with self._lock:
            export.hold = hold
            export.deadline = self._clock() + lease_seconds
        self._notify()

    def end(self, export: Export, reason: str) -> None:
        """Remove an export, whose blocks are no longer held."""
        with self._lock:
            self._remove(export, reason)
        self._notify()

    def extend(self, transfer_id: str, lease_seconds: float) -> None:
        """Let a lease end `lease_seconds` from now; ignored if there is none."""
        with self._lock:
            export = self._exports.get(transfer_id)
            if export is not None and export.deadline is not None:
                export.deadline = self._clock() + lease_seconds
        self._notify()

    def release(self, transfer_id: str) -> None:
        """Let a lease end now; ignored if there is none."""
        with self._lock:
            export = self._exports.get(transfer_id)
            if export is not None:
                export.released = True
        self._notify()

    def next_end(self) -> float | None:
        """Return the time when the next lease ends, on the monotonic clock; None if there is none."""
        with self._lock:
            return min((end for _, end in self._leases()), default=None)

    def has_ended(self) -> bool:
        """Whether `take_ended` would return a lease."""
        end = self.next_end() if self._exports else None
        return end is not None and end <= self._clock()

    def take_ended(self) -> list[Export]:
        """Remove and return the leases that have ended."""
        now = self._clock()
        with self._lock:
            ended = [export for export, end in self._leases() if end <= now]
            for export in ended:
                self.num_expired += not export.released
                self._remove(export, "was released" if export.released else "lease has ended")
        if ended:
            self._notify()
        return ended

    def progress(self, transfer_id: str, have: int) -> Progress | Ended:
        """Return the state of an export, with the blocks after the first `have`."""
        with self._lock:
            export = self._exports.get(transfer_id)
            if export is None:
                reason = self._ended.get(transfer_id)
                return Progress() if reason is None else Ended(f"the export {reason}")
            if export.deadline is not None and (export.released or export.deadline <= self._clock()):
                return Ended("the export's lease has ended")
            return Progress(
                known=True,
                complete=export.hold is not None,
                num_tokens=export.num_tokens,
                digest=export.digest,
                blocks=export.blocks[have:],
                epochs=export.epochs[have:],
            )

    def _leases(self) -> list[tuple[Export, float]]:
        """Return the exports whose lease has begun, and when it ends."""
        return [
            (export, 0.0 if export.released else export.deadline)
            for export in self._exports.values()
            if export.deadline is not None
        ]

    def _remove(self, export: Export, reason: str) -> None:
        if self._exports.get(export.transfer_id) is export:
            del self._exports[export.transfer_id]
            self._ended[export.transfer_id] = reason
            if len(self._ended) > _MAX_ENDED:
                self._ended.popitem(last=False)
