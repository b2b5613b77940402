"""Accounts of the memory that requests take while they arrive and wait for their responses."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

_LEASE = 16 << 10  # bytes of the server's memory that an idle connection keeps


class MemoryAccount:
    """Bytes of requests that are held in memory, on one connection or, without a parent, on the server.

    `take` accounts for bytes that have arrived. `reserve` accounts for bytes that the client may send, and waits until
    there is room; waiting clients are held back by flow control. Reservations use 7/8 of the limit, so that large
    messages do not keep out small ones. Memory is leased from the parent in steps, which the connection keeps for
    its next requests; `close` returns the lease.
    """

    __slots__ = ("_blocked", "_leased", "_limit", "_parent", "_waiting", "used")

    def __init__(self, limit: int, parent: MemoryAccount | None = None) -> None:
        self._limit = limit
        self._parent = parent
        self._leased = 0 if parent is not None else limit  # `used` is at most this
        self._waiting: deque[Reservation] = deque()
        # Accounts whose first reservation waits for this one.
        self._blocked: OrderedDict[MemoryAccount, None] = OrderedDict()
        self.used = 0

    def take(self, size: int) -> bool:
        """Account for `size` bytes. Returns False, and accounts for nothing, if they exceed a limit."""
        used = self.used + size
        if used <= self._leased:
            self.used = used
            return True
        parent = self._parent
        if parent is None or used > self._limit:
            return False
        step = used - self._leased
        spare = min(_LEASE, self._limit - used)
        if not parent.take(step + spare):
            spare = 0
            if not parent.take(step):
                return False
        self._leased += step + spare
        self.used = used
        return True

    def release(self, size: int) -> None:
        """Undo `take` or a granted reservation of `size` bytes."""
        used = self.used = self.used - size
        if self._leased - used > 2 * _LEASE or self._waiting:
            self._return_lease(_LEASE)
            self._grant()
        if self._blocked:
            self._grant_blocked()

    def close(self) -> None:
        """Return what is leased; nothing is used any more."""
        self._return_lease(0)

    def reserve(self, size: int, on_granted: Callable[[], None]) -> Reservation | None:
        """Reserve `size` bytes. Returns None if they are granted at once; else `on_granted` is called when they are.

        Raises `OverflowError` if the limits never allow so much.
        """
        if not self._waiting and self._has_room(size):
            self._add(size)
            return None
        if size > self._max_reserved:
            raise OverflowError(f"{size} bytes exceed the memory for requests ({self._max_reserved} bytes)")
        reservation = Reservation(self, size, on_granted)
        self._waiting.append(reservation)
        if len(self._waiting) == 1:
            self._grant()  # finds no room; registers this account with the parent
        return reservation

    @property
    def _max_reserved(self) -> int:
        own = self._limit - self._limit // 8
        return own if self._parent is None else min(own, self._parent._max_reserved)

    def _has_room(self, size: int) -> bool:
        """Whether a reservation fits now."""
        used = self.used + size
        if used > self._limit - self._limit // 8:
            return False
        return self._parent is None or used <= self._leased or self._parent._has_room(used - self._leased)

    def _grant(self) -> bool:
        """Grant reservations in order. Returns False if the first one must wait for the parent."""
        while self._waiting:
            first = self._waiting[0]
            if first.cancelled:
                self._waiting.popleft()
            elif self._has_room(first.size):
                self._waiting.popleft()
                self._add(first.size)
                first.on_granted()
            else:
                parent = self._parent
                if parent is None or self.used + first.size > self._limit - self._limit // 8:
                    return True
                parent._blocked[self] = None
                return False
        return True

    def _grant_blocked(self) -> None:
        """Grant the reservations of the accounts that wait for this one, in order."""
        while self._blocked:
            account, _ = self._blocked.popitem(last=False)
            if not account._grant():
                self._blocked.move_to_end(account, last=False)
                return

    def _on_cancelled(self) -> None:
        """Handle the cancellation of a reservation: those behind it may fit, also those of other connections."""
        self._grant()
        if self._parent is not None:
            self._parent._grant_blocked()

    def _add(self, size: int) -> None:
        self.used += size
        if self.used > self._leased and self._parent is not None:
            self._parent._add(self.used - self._leased)
            self._leased = self.used

    def _return_lease(self, keep: int) -> None:
        unused = self._leased - self.used - keep
        if unused > 0 and self._parent is not None:
            self._leased -= unused
            self._parent.release(unused)


class Reservation:
    """Bytes that wait for room in a `MemoryAccount`."""

    __slots__ = ("_account", "cancelled", "on_granted", "size")

    def __init__(self, account: MemoryAccount, size: int, on_granted: Callable[[], None]) -> None:
        self._account = account
        self.size = size
        self.on_granted = on_granted
        self.cancelled = False

    def cancel(self) -> None:
        """Stop waiting."""
        self.cancelled = True
        self._account._on_cancelled()
