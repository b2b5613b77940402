"""The cache in memory: an LRU whose capacity is in bytes."""

from __future__ import annotations

from collections import OrderedDict

from neso.server.response_cache.key import Key
from neso.server.response_cache.response import CachedResponse


class LocalCache:
    """Least recently used entries make room for new ones. Not thread-safe; belongs to the core's loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.byte_size = 0
        self._entries: OrderedDict[Key, CachedResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    async def close(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.byte_size = 0

    def get(self, key: Key) -> CachedResponse | None:
        """The response that was put under that key, None if there is none (any more)."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: Key, response: CachedResponse) -> bool:
        """Keep a response, in place of one of that key; False if it is larger than the whole cache."""
        size = response.byte_size
        if size > self.capacity:
            return False
        replaced = self._entries.pop(key, None)
        if replaced is not None:
            self.byte_size -= replaced.byte_size
        while self.byte_size + size > self.capacity:
            _, oldest = self._entries.popitem(last=False)
            self.byte_size -= oldest.byte_size
        self._entries[key] = response
        self.byte_size += size
        return True
