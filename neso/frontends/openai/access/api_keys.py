"""The keys that open OpenAI's API."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neso.frontends.openai.access.key_file import KeyEntry, read_key_file
from neso.frontends.openai_options import Quota
from neso.server.errors import InvalidArgument

logger = logging.getLogger(__name__)

_LOOK_EVERY = 1.0
"""Seconds between two looks at the file."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key by its name, which may be told; only a digest of it is kept."""

    name: str
    digest: bytes
    requests: int | None = None
    tokens: int | None = None
    owner: str = ""
    """Whose it is, to tell clients apart: its name, but for one that is named after its line in a file, which moves."""

    def quota(self, default: Quota) -> Quota:
        """What it may ask for."""
        return Quota(
            default.requests if self.requests is None else self.requests,
            default.tokens if self.tokens is None else self.tokens,
        )


class ApiKeys:
    """Keys that were given, and those of a file, which is read again when it has changed.

    A file that cannot be read then, or holds what it must not, leaves the keys as they were. Belongs to one thread.
    """

    def __init__(self, given: Sequence[str] = (), file: Path | None = None) -> None:
        """Raises `InvalidArgument` for a file that cannot be used, and for no key at all."""
        self._pepper = os.urandom(32)
        self._given = [self._key(KeyEntry(f"key-{n}", key)) for n, key in enumerate(given, start=1)]
        self._file = file
        self._seen: tuple[int, ...] | None = None
        self._look_at = 0.0
        self._keys = self._given
        if not all(given):
            raise InvalidArgument("an API key must not be empty")
        if file is not None:
            self._read(file)
        if not self._keys:
            raise InvalidArgument(f"the file of API keys '{file}' holds none")

    def find(self, secret: bytes) -> ApiKey | None:
        """The key that is `secret`. Takes as long whichever it is, and if it is none."""
        if self._file is not None and time.monotonic() >= self._look_at:
            self.reload()
        digest = self._digest(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def reload(self, *, force: bool = False) -> None:
        """Read the file again if it has changed, or in any case."""
        self._look_at = time.monotonic() + _LOOK_EVERY
        if self._file is None or not (force or _state_of(self._file) != self._seen):
            return
        try:
            self._read(self._file)
        except InvalidArgument as error:
            logger.error("the API keys stay as they are: %s", error.message)
        else:
            logger.info("read %d API keys", len(self._keys))

    def _read(self, file: Path) -> None:
        self._seen = _state_of(file)
        self._look_at = time.monotonic() + _LOOK_EVERY
        self._keys = [*self._given, *map(self._key, read_key_file(file))]

    def _key(self, entry: KeyEntry) -> ApiKey:
        # Whatever bytes the command line or a header has.
        digest = self._digest(entry.secret.encode("utf-8", "surrogateescape"))
        owner = entry.name if entry.is_named else digest.hex()
        return ApiKey(entry.name, digest, entry.requests, entry.tokens, owner)

    def _digest(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, key=self._pepper).digest()


def _state_of(file: Path) -> tuple[int, ...] | None:
    """What changes when the file does."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
