"""Messages as bytes: a length of 4 bytes, little-endian, and a pickle in which nothing but messages can be.

The standard library's, so that a model's environment needs no package of ours; two interpreters may have different
versions. The unpickler makes the classes of `messages` and plain data, and refuses all else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

from neso.backends.python.process import messages
from neso.backends.python.process.messages import MESSAGES, Message

_LENGTH = 4
_KINDS = frozenset(MESSAGES.values())


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) in _KINDS or value in _KINDS:
            return NotImplemented  # as pickle does it
        raise TypeError(f"{type(value).__name__} objects cannot be passed to the server: {value!r}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = MESSAGES.get(name) if module == messages.__name__ else None
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} must not be in a message")
        return found


def encode(message: Message) -> bytes:
    """Raises `TypeError` for values that are no plain data."""
    buffer = io.BytesIO()
    buffer.write(bytes(_LENGTH))
    _Pickler(buffer, protocol=4).dump(message)
    data = buffer.getbuffer()
    data[:_LENGTH] = (len(data) - _LENGTH).to_bytes(_LENGTH, "little")
    return data.tobytes()


class Decoder:
    """Puts messages together from the pieces that a stream socket gives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now. Raises `pickle.UnpicklingError` for what is none."""
        self._buffer += data
        start = 0
        try:
            while (message := self._next(start)) is not None:
                start, content = message
                yield _Unpickler(io.BytesIO(content)).load()
        finally:
            del self._buffer[:start]

    def _next(self, start: int) -> tuple[int, bytes] | None:
        body = start + _LENGTH
        if len(self._buffer) < body:
            return None
        end = body + int.from_bytes(self._buffer[start:body], "little")
        return (end, bytes(self._buffer[body:end])) if len(self._buffer) >= end else None
