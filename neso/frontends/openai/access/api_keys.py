"""API keys: given on the command line or read from a file that is reloaded when it changes.

Format of the file: one key per line, `[NAME:]KEY [rpm=N] [tpm=N]`; lines that begin with `#` are comments.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neso.frontends.openai_options import UNLIMITED, Quota
from neso.server.errors import InvalidArgument

logger = logging.getLogger(__name__)

_CHECK_INTERVAL = 1.0
"""Minimum seconds between two checks for changes of the file."""
_SCOPE_KEY = "neso.api_key"
_BEARER = b"bearer "


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A line of the key file. `requests` and `tokens` per minute override the default quota; 0 is unlimited."""

    name: str
    secret: str = field(repr=False)
    requests: int | None = None
    tokens: int | None = None
    is_named: bool = True
    """False if the line has no name; `name` is then derived from the line number."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A loaded key. Only a keyed digest of the secret is kept; `name` may be logged."""

    name: str
    digest: bytes
    requests: int | None = None
    tokens: int | None = None
    owner: str = ""
    """Stable identity of the key: its name, or the digest for keys without a name, whose line number may change."""

    def quota(self, default: Quota) -> Quota:
        """Return the key's quota; limits that the key does not set come from `default`."""
        return Quota(
            default.requests if self.requests is None else self.requests,
            default.tokens if self.tokens is None else self.tokens,
        )


class ApiKeys:
    """The accepted keys: `given` keys, and the keys in `file`, which is reloaded when it changes.

    If the changed file cannot be read or is invalid, the previous keys remain valid. Not thread-safe.
    """

    def __init__(self, given: Sequence[str] = (), file: Path | None = None) -> None:
        """Raises `InvalidArgument` for an empty key, an invalid file, or if no key is given."""
        self._pepper = os.urandom(32)
        self._given = [self._load(KeyEntry(f"key-{n}", key)) for n, key in enumerate(given, start=1)]
        self._file = file
        self._file_state: tuple[int, ...] | None = None
        self._next_check = 0.0
        self._keys = self._given
        if not all(given):
            raise InvalidArgument("an API key must not be empty")
        if file is not None:
            self._read(file)
        if not self._keys:
            raise InvalidArgument(f"the file of API keys '{file}' contains no keys")

    def find(self, secret: bytes) -> ApiKey | None:
        """Return the key with this secret, or None. Takes constant time for a given number of keys."""
        if self._file is not None and time.monotonic() >= self._next_check:
            self.reload()
        digest = self._digest(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def reload(self, *, force: bool = False) -> None:
        """Read the file again if it has changed, or unconditionally with `force`."""
        self._next_check = time.monotonic() + _CHECK_INTERVAL
        if self._file is None or not (force or _file_state(self._file) != self._file_state):
            return
        try:
            self._read(self._file)
        except InvalidArgument as error:
            logger.error("API keys were not reloaded: %s", error.message)
        else:
            logger.info("loaded %d API keys", len(self._keys))

    def _read(self, file: Path) -> None:
        self._file_state = _file_state(file)
        self._next_check = time.monotonic() + _CHECK_INTERVAL
        self._keys = [*self._given, *map(self._load, read_key_file(file))]

    def _load(self, entry: KeyEntry) -> ApiKey:
        # surrogateescape: keys may hold arbitrary bytes.
        digest = self._digest(entry.secret.encode("utf-8", "surrogateescape"))
        owner = entry.name if entry.is_named else digest.hex()
        return ApiKey(entry.name, digest, entry.requests, entry.tokens, owner)

    def _digest(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, key=self._pepper).digest()


def request_key(scope: Mapping[str, Any]) -> ApiKey | None:
    """Return the key that authenticated the request of an ASGI `scope`; None if no key is required."""
    return scope.get(_SCOPE_KEY)


def set_request_key(scope: dict[str, Any], key: ApiKey) -> None:
    """Attach the key that authenticated a request to its ASGI `scope`."""
    scope[_SCOPE_KEY] = key


def bearer_token(scope: Mapping[str, Any]) -> bytes | None:
    """Return the secret in `Authorization: Bearer KEY`, else in `x-api-key: KEY`, else None."""
    other = None
    for name, value in scope["headers"]:
        if name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER:
            return bytes(value[len(_BEARER) :].strip())
        if name == b"x-api-key":
            other = bytes(value.strip())
    return other


def read_key_file(path: Path) -> list[KeyEntry]:
    """Parse a key file. Raises `InvalidArgument` with file and line; messages never contain a key."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"the file of API keys '{path}' cannot be read: {getattr(error, 'strerror', error)}"
        ) from None
    entries = list(_parse_lines(path, text.splitlines()))
    for attribute in ("name", "secret"):
        values = [getattr(entry, attribute) for entry in entries]
        if len(set(values)) < len(values):
            raise InvalidArgument(f"{path}: two keys are the same or have the same name")
    return entries


def _parse_lines(path: Path, lines: Iterable[str]) -> Iterator[KeyEntry]:
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, colon, secret = words[0].partition(":")
        if not colon:
            name, secret = f"line-{number}", words[0]
        if not name or not secret:
            raise InvalidArgument(f"{path}:{number}: expected [NAME:]KEY [rpm=N] [tpm=N]")
        limits = dict(_parse_limit(path, number, word) for word in words[1:])
        yield KeyEntry(name, secret, limits.get("rpm"), limits.get("tpm"), is_named=bool(colon))


def _parse_limit(path: Path, number: int, word: str) -> tuple[str, int]:
    name, equals, value = word.partition("=")
    if name not in ("rpm", "tpm") or not equals or not (value == "unlimited" or value.isdecimal()):
        raise InvalidArgument(f"{path}:{number}: expected rpm=N, tpm=N or N 'unlimited' after the key")
    return name, UNLIMITED if value == "unlimited" else max(int(value), 1)


def _file_state(file: Path) -> tuple[int, ...] | None:
    """Return modification time, size and inode; None if the file does not exist."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
