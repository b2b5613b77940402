"""Keys of prompt prefixes that are the same in all processes, so that a server can tell which engine holds a prefix."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

_encode = msgspec.msgpack.Encoder().encode


class AdapterVersion(NamedTuple):
    """Part of a cache identity. `version`: counts the loads of adapters in one engine; not part of keys."""

    name: str
    version: int


def root_key(identity: Hashable) -> int:
    """Return the key of an empty prefix. `identity`: strings and `AdapterVersion`s that separate prefixes."""
    parts = identity if isinstance(identity, tuple) else (identity,)
    names = [part.name if isinstance(part, AdapterVersion) else part for part in parts]
    return _key(repr(names).encode())  # escapes what is not valid Unicode


def next_key(parent: int, tokens: Sequence[int | bytes]) -> int:
    """Return the 64-bit key of a prefix that continues the one with the key `parent` by the tokens of a block."""
    return _key(parent.to_bytes(8, "little") + _encode(tokens))


def _key(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


class BlockChanges(msgspec.Struct, frozen=True, tag="blocks"):
    """Prefixes that an engine holds since the message before, and those that it no longer holds.

    - number: of the message, counted per engine from 1; a receiver that has missed one asks for all keys
    - stored, removed: disjoint, in no order; complete: `stored` are all prefixes that the engine holds
    """

    number: int
    stored: list[int]
    removed: list[int] = []
    complete: bool = False


class BlockJournal:
    """Collects the changes of a prefix cache. Two blocks can have the same key: it is held until both are gone."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._changed: dict[int, bool] = {}  # whether the key is held now; not if it was before
        self._number = 0

    def add(self, key: int) -> None:
        """Record that a block with this key is cached."""
        count = self._held.get(key, 0)
        self._held[key] = count + 1
        if not count:
            self._change(key, held=True)

    def remove(self, key: int) -> None:
        """Record that a block with this key is no longer cached."""
        count = self._held[key] - 1
        if count:
            self._held[key] = count
        else:
            del self._held[key]
            self._change(key, held=False)

    def clear(self) -> None:
        """Record that nothing is cached."""
        for key in tuple(self._held):
            del self._held[key]
            self._change(key, held=False)

    def _change(self, key: int, *, held: bool) -> None:
        if key in self._changed:
            del self._changed[key]  # as in the last message
        else:
            self._changed[key] = held

    def take(self) -> BlockChanges | None:
        """Return the changes since the last call; None if there are none."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, {}
        self._number += 1
        stored = [key for key, held in changed.items() if held]
        return BlockChanges(self._number, stored, [key for key, held in changed.items() if not held])

    def snapshot(self) -> BlockChanges:
        """Return all keys; `take` then returns later changes."""
        self._changed = {}
        self._number += 1
        return BlockChanges(self._number, list(self._held), complete=True)
