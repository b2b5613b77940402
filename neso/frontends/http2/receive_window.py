"""How much a client may still send: on a connection, or on one of its streams."""

from __future__ import annotations


class ReceiveWindow:
    """Bytes. What has been dealt with is given back to the client in large pieces."""

    __slots__ = ("_given_back", "_left", "_size")

    def __init__(self, size: int) -> None:
        self._size = self._left = size
        self._given_back = 0

    def take(self, size: int) -> bool:
        """So much came. False: it was more than the client may send."""
        self._left -= size
        return self._left >= 0

    def give_back(self, size: int) -> int:
        """So much has been dealt with. The increment to send now, 0 for none."""
        given = self._given_back + size
        if given * 2 < self._size:
            self._given_back = given
            return 0
        self._given_back = 0
        self._left += given
        return given
