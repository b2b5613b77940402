"""Memory of the request bodies of a connection, as a part of the memory for all bodies."""

from __future__ import annotations

from collections.abc import Callable

from neso.frontends.transport.memory import MemoryAccount, Reservation

_STEP = 64 << 10  # bytes; a body of unknown length is accounted for in steps


class BodyMemory:
    """Accounts for one body at a time. Bodies that arrive with a single read are not accounted for.

    `waiting`: the body has to wait until there is room; `on_granted` is called then.
    """

    __slots__ = ("_account", "_on_granted", "_reservation", "held")

    def __init__(self, account: MemoryAccount, on_granted: Callable[[], None]) -> None:
        self._account = account
        self._on_granted = on_granted
        self._reservation: Reservation | None = None
        self.held = 0  # bytes of the current body

    @property
    def waiting(self) -> bool:
        return self._reservation is not None

    def receive(self, received: int, length: int | None) -> bool:
        """Account for a body of which `received` bytes have arrived. Returns False if there is no room for it.

        All bytes of a body with a known `length` are reserved when it begins, so that bodies whose rest does not fit do
        not block each other. Others are accounted for as they arrive, and rejected when there is no room.
        """
        if length is not None:
            return self.held > 0 or self.waiting or self._reserve(max(length, 1))
        if received <= self.held:
            return True
        missing = -(-received // _STEP) * _STEP - self.held
        if not self._account.take(missing):
            return False
        self.held += missing
        return True

    def complete(self) -> int:
        """Return the bytes held for the body, which is complete. The caller releases them with `release`."""
        self._cancel()  # its last bytes arrived before reading was paused
        held, self.held = self.held, 0
        return held

    def release(self, size: int) -> None:
        """Release the bytes of a complete body."""
        self._account.release(size)

    def clear(self) -> None:
        """Drop the current body."""
        self.release(self.complete())

    def _reserve(self, size: int) -> bool:
        def grant() -> None:
            self._reservation = None
            self.held = size
            self._on_granted()

        try:
            self._reservation = self._account.reserve(size, grant)
        except OverflowError:
            return False
        if self._reservation is None:
            self.held = size
        return True

    def _cancel(self) -> None:
        if self._reservation is not None:
            self._reservation.cancel()
            self._reservation = None
