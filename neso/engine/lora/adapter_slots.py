"""Adapter slots of the runner. The number of slots limits the number of adapters in a batch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from neso.engine.core.block_pool import IntegrityError


@dataclass(slots=True, eq=False)
class AdapterUse:
    """The adapter of a sequence, and its slot while the sequence runs; -1 otherwise."""

    version: int
    slot: int = -1


class AdapterSlots:
    """Assigns slots to adapters. Running sequences hold the slots of their adapters.

    A slot without holders keeps its adapter until the slot is needed for another adapter; the least recently used slot
    is replaced first.

    Adapters are identified by version, a positive number that is never reused. When an adapter waits for a slot, the
    least recently used slot admits no sequences queued behind it, so the slot drains and the adapter does not starve.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._ready: set[int] = set()
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # by last use
        self._holders: Counter[int] = Counter()
        self._free = list(reversed(range(num_slots)))
        self._draining: dict[int, int] = {}  # version in the slot -> version waiting for the slot
        self._changes: list[tuple[int, int]] = []

    # -- adapters -----------------------------------------------------------------------------------------------

    def add(self, version: int) -> None:
        """Allow sequences to run with an adapter whose weights are in memory."""
        self._ready.add(version)

    def remove(self, version: int) -> None:
        """Forget an adapter whose weights were removed; no sequence may hold it."""
        assert not self._holders[version], "an adapter in use is removed"
        self._ready.discard(version)
        del self._holders[version]
        self.vacate(version)

    def vacate(self, version: int) -> None:
        """Free the slot of an adapter without holders."""
        slot = self._slot_of.pop(version, None)
        if slot is not None:
            self._free.append(slot)
            self._changes.append((slot, 0))

    # -- sequences ----------------------------------------------------------------------------------------------

    def begin_admission(self) -> None:
        """Begin a pass over the queue from its head."""
        self._draining.clear()

    def admits(self, use: AdapterUse) -> bool:
        """Whether a sequence can run. Called in queue order."""
        version = use.version
        if version not in self._ready:
            return False
        if version in self._slot_of:
            return version not in self._draining
        if self._free or self._idle() is not None:
            return True
        self._drain_for(version)
        return False

    def acquire(self, use: AdapterUse) -> None:
        """Hold the slot of an adapter; requires that `admits` returned True or that another sequence holds it."""
        version = use.version
        if version not in self._slot_of:
            self._slot_of[version] = self._take_slot()
            self._changes.append((self._slot_of[version], version))
        self._slot_of.move_to_end(version)
        self._holders[version] += 1
        use.slot = self._slot_of[version]

    def release(self, use: AdapterUse) -> None:
        """Undo `acquire`. Idempotent."""
        if use.slot >= 0:
            self._holders[use.version] -= 1
            self._slot_of.move_to_end(use.version)
            use.slot = -1

    def take_changes(self) -> list[tuple[int, int]]:
        """Return the (slot, version) pairs that changed since the last call; version 0 for an empty slot."""
        changes, self._changes = self._changes, []
        return changes

    def holds(self, version: int) -> bool:
        """Whether a running sequence uses the adapter."""
        return self._holders[version] > 0

    def check_integrity(self, running: Iterable[AdapterUse]) -> None:
        """Check that exactly the running sequences hold slots. Raises `IntegrityError`."""
        running = list(running)
        holders = Counter(use.version for use in running)
        if holders != +self._holders:
            raise IntegrityError(f"adapters are held as {dict(self._holders)}, but run as {dict(holders)}")
        used = sorted(self._slot_of.values())
        if sorted(used + self._free) != list(range(self.num_slots)):
            raise IntegrityError("an adapter slot is lost or given twice")
        for use in running:
            if use.slot != self._slot_of.get(use.version, -1):
                raise IntegrityError(f"a sequence with adapter {use.version} runs in slot {use.slot}")

    def _idle(self) -> int | None:
        """Return the least recently used adapter without holders; None if all are held."""
        return next((version for version in self._slot_of if not self._holders[version]), None)

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        idle = self._idle()
        assert idle is not None, "an adapter was admitted without a slot"
        return self._slot_of.pop(idle)

    def _drain_for(self, version: int) -> None:
        if version in self._draining.values():
            return
        victim = next((known for known in self._slot_of if known not in self._draining), None)
        if victim is not None:
            self._draining[victim] = version
