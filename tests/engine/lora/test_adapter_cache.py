"""Adapter cache and slots: pinned adapters stay, the least recently used are evicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from neso.engine.lora.adapter_cache import AdapterCache, CacheFull
from neso.engine.lora.adapter_slots import AdapterSlots, AdapterUse

CAPACITY = 10


@dataclass
class Bytes:
    num_bytes: int


class CacheMachine(RuleBasedStateMachine):
    """Compare with a list of versions ordered by last use."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: AdapterCache[Bytes] = AdapterCache(CAPACITY)
        self.used: list[int] = []
        self.sizes: dict[int, int] = {}
        self.pins: Counter[int] = Counter()
        self.next = 1

    @rule(size=st.integers(1, CAPACITY + 2), pinned=st.booleans())
    def put(self, size: int, pinned: bool) -> None:
        version, self.next = self.next, self.next + 1
        if pinned:
            self.pins[version] += 1
            self.cache.pin(version)
        expected, room = [], CAPACITY - sum(self.sizes[v] for v in self.used)
        for candidate in self.used:
            if room < size and not self.pins[candidate]:
                expected.append(candidate)
                room += self.sizes[candidate]
        if room < size:
            with pytest.raises(CacheFull):
                self.cache.put(version, Bytes(size))
            return
        assert self.cache.put(version, Bytes(size)) == expected
        self.used = [v for v in self.used if v not in expected] + [version]
        self.sizes[version] = size

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(self.used))
        self.cache.pin(version)
        self.pins[version] += 1
        self.touch(version)

    @precondition(lambda self: +self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(+self.pins)))
        self.cache.unpin(version)
        self.pins[version] -= 1
        self.touch(version)

    def touch(self, version: int) -> None:
        if version in self.used:
            self.used.remove(version)
            self.used.append(version)

    @invariant()
    def cache_is_consistent(self) -> None:
        assert [v for v in range(self.next) if v in self.cache] == sorted(self.used)
        assert self.cache.num_bytes == sum(self.sizes[v] for v in self.used) <= CAPACITY


class SlotsMachine(RuleBasedStateMachine):
    """Sequences start and end as scheduled; slots of running sequences keep their adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = AdapterSlots(3)
        self.waiting: list[AdapterUse] = []
        self.running: list[AdapterUse] = []
        self.in_slot: dict[int, int] = {}  # the slots of a runner
        self.loaded: set[int] = set()

    @rule(version=st.integers(1, 6))
    def arrive(self, version: int) -> None:
        self.waiting.append(AdapterUse(version))

    @rule(version=st.integers(1, 6))
    def load(self, version: int) -> None:
        self.slots.add(version)
        self.loaded.add(version)

    @rule(version=st.integers(1, 6))
    def unload(self, version: int) -> None:
        if version in self.loaded and not self.slots.holds(version):
            self.slots.remove(version)
            self.loaded.discard(version)
            self.fill()

    @rule(places=st.integers(1, 8))
    def admit(self, places: int) -> None:
        self.slots.begin_admission()
        for use in list(self.waiting):
            if len(self.running) >= places:
                break
            if self.slots.admits(use):
                assert use.version in self.loaded
                self.waiting.remove(use)
                self.slots.acquire(use)
                self.running.append(use)
        self.fill()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        use = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.slots.release(use)
        self.slots.release(use)

    def fill(self) -> None:
        self.in_slot.update(self.slots.take_changes())

    @invariant()
    def slots_match_adapters(self) -> None:
        self.slots.check_integrity(self.running)
        for use in self.running:
            assert self.in_slot[use.slot] == use.version

    def teardown(self) -> None:
        """All sequences with an adapter run eventually."""
        for version in {use.version for use in self.waiting}:
            self.load(version)
        for _ in range(len(self.waiting) + 1):
            self.admit(8)
            while self.running:
                self.slots.release(self.running.pop())
        assert not self.waiting


TestAdapterCache = CacheMachine.TestCase
TestAdapterSlots = SlotsMachine.TestCase
TestAdapterCache.settings = TestAdapterSlots.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)


def test_the_least_recently_used_idle_slot_is_reused():
    slots = AdapterSlots(2)
    for version in (1, 2, 3):
        slots.add(version)
    first, second = AdapterUse(1), AdapterUse(2)
    for use in (first, second):
        assert slots.admits(use)
        slots.acquire(use)
    assert not slots.admits(AdapterUse(3)), "both slots are held"
    slots.release(second)
    slots.release(first)
    third = AdapterUse(3)
    assert slots.admits(third)
    slots.acquire(third)
    assert slots.take_changes() == [(0, 1), (1, 2), (1, 3)], "2 was let go of first"


def test_a_waiting_adapter_does_not_starve():
    """Under constant requests for the loaded adapters, one slot drains for the waiting adapter."""
    slots = AdapterSlots(2)
    for version in (1, 2, 3):
        slots.add(version)
    running = [AdapterUse(1), AdapterUse(2)]
    for use in running:
        slots.acquire(use)
    slots.begin_admission()
    assert not slots.admits(AdapterUse(3))
    assert [slots.admits(AdapterUse(v)) for v in (1, 2)] == [False, True]
    slots.release(running[0])
    slots.begin_admission()
    assert slots.admits(AdapterUse(3))
