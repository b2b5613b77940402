"""What the front end knows of a worker's prefix cache: the keys that the worker reports, or an estimate."""

from __future__ import annotations

import logging
from typing import Protocol

from neso.engine.client.prefix_estimate import PrefixEstimate, PrefixKeys
from neso.engine.core.prefix_keys import BlockChanges

logger = logging.getLogger(__name__)


class HasKeys(Protocol):
    """A request. `keys`: None if prefixes are not cached."""

    @property
    def keys(self) -> PrefixKeys | None: ...


class WorkerPrefixes:
    """Blocks that a worker holds, and those that its requests will compute.

    - estimate: made from the requests that the worker got; used before the worker has reported all its keys, and for
      requests whose keys engines do not know (images, embeddings)
    - max_blocks: number of keys that are kept at most; a worker that reports more is estimated from then on
    """

    def __init__(self, name: str, estimate: PrefixEstimate, max_blocks: int) -> None:
        self._name, self._estimate, self._max_blocks = name, estimate, max_blocks
        self._held: set[int] | None = None
        self._number = 0
        self._asked = self._overflowed = False
        self._expected: dict[HasKeys, list[int]] = {}  # first keys of the requests that the worker has
        self._num_expecting: dict[int, int] = {}  # by key
        self._version = 0
        self._last: tuple[PrefixKeys, int, int, int] | None = None

    @property
    def known(self) -> bool:
        """Whether the worker has reported what it holds."""
        return self._held is not None

    def __len__(self) -> int:
        return len(self._estimate) if self._held is None else len(self._held)

    def match(self, keys: PrefixKeys) -> int:
        """Return how many of the first blocks the worker holds or will hold."""
        last = self._last  # a request is compared with the workers several times
        if last is not None and last[0] is keys and last[1:3] == (len(keys.keys), self._version):
            return last[3]
        if self._held is None or not keys.known_to_engines:
            found = self._estimate.match(keys.keys)
        else:
            found = 0
            for key in keys.keys:
                if key not in self._held and key not in self._num_expecting:
                    break
                found += 1
        self._last = (keys, len(keys.keys), self._version, found)
        return found

    # -- requests of the worker ---------------------------------------------------------------------------------

    def add(self, request: HasKeys) -> None:
        """Expect the blocks of a request that the worker gets, until `remove`."""
        if request.keys is None or request in self._expected:
            return
        self._version += 1
        self._expected[request] = keys = list(request.keys.keys)
        for key in keys:
            self._num_expecting[key] = self._num_expecting.get(key, 0) + 1

    def remove(self, request: HasKeys) -> None:
        """Forget a request. Its blocks count if the worker has reported them."""
        self._version += 1
        for key in self._expected.pop(request, ()):
            self._num_expecting[key] -= 1
            if not self._num_expecting[key]:
                del self._num_expecting[key]

    # -- reports ------------------------------------------------------------------------------------------------

    def asked(self) -> None:
        """Record that the worker was asked for all its keys."""
        self._asked = True

    def apply(self, changes: BlockChanges) -> bool:
        """Apply a report. Returns whether a message is missing, so that all keys must be asked for."""
        if self._overflowed:
            return False
        if changes.complete:
            self._held, self._asked = set(changes.stored), False
        elif self._held is None or changes.number != self._number + 1:
            return not self._asked
        else:
            self._held.update(changes.stored)
            self._held.difference_update(changes.removed)
        self._number = changes.number
        self._version += 1
        if len(self._held) > self._max_blocks:
            logger.warning(
                "worker '%s' holds more than max_tracked_blocks, %d blocks: its prefix cache is estimated",
                *(self._name, self._max_blocks),
            )
            self._overflowed, self._held = True, None
        return False
