"""Which header lists are requests (RFC 9113, sections 8.2 and 8.3)."""

from __future__ import annotations

import re
from collections.abc import Iterable

Fields = Iterable[tuple[bytes, bytes]]

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(rb"[\0\r\n]")
_CONNECTION_SPECIFIC = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_REQUIRED = (b":method", b":scheme", b":path")


def request_fault(fields: Fields) -> str | None:
    """What is wrong with the headers of a request, None if nothing is."""
    pseudo: dict[bytes, bytes] = {}
    regular = False
    for name, value in fields:
        if not name.startswith(b":"):
            regular = True
            if (fault := _field_fault(name, value)) is not None:
                return fault
        elif regular or name in pseudo or name not in _PSEUDO or _BAD_VALUE.search(value):
            return f"bad pseudo-header {name!r}"
        else:
            pseudo[name] = value
    missing = [name for name in _REQUIRED if not pseudo.get(name)]
    return f"no {missing[0].decode()}" if missing else None


def trailers_fault(fields: Fields) -> str | None:
    """What is wrong with trailers, None if nothing is."""
    faults = (_field_fault(name, value) for name, value in fields)
    return next((fault for fault in faults if fault is not None), None)


def content_length(fields: Fields) -> int | None:
    """How long the body is said to be. Raises `ValueError`."""
    values = {value for name, value in fields if name == b"content-length"}
    if not values:
        return None
    if len(values) > 1 or not (value := values.pop()).isdigit() or len(value) > 18:
        raise ValueError("bad content-length")
    return int(value)


def _field_fault(name: bytes, value: bytes) -> str | None:
    if _NAME.fullmatch(name) is None:
        return f"bad header name {name!r}"
    if name in _CONNECTION_SPECIFIC or (name == b"te" and value != b"trailers"):
        return f"header {name!r} means nothing in HTTP/2"
    return f"bad value of header {name!r}" if _BAD_VALUE.search(value) else None
