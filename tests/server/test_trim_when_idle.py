"""Free pages are returned to the operating system between loads, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from virtual_time import run_in_virtual_time

from neso.server import memory

MIB = 1 << 20


def test_memory_is_trimmed_when_it_has_grown_and_no_request_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resident, busy, trims = [100 * MIB], [False], []

    def trim(pad: int) -> None:
        trims.append(resident[0] // MIB)
        resident[0] = 101 * MIB

    async def direct(function, *arguments):  # virtual time does not wait for threads
        return function(*arguments)

    monkeypatch.setattr(memory, "_malloc_trim", trim)
    monkeypatch.setattr(memory, "resident_memory", lambda: resident[0])
    monkeypatch.setattr(asyncio, "to_thread", direct)

    async def check() -> None:
        task = asyncio.ensure_future(memory.trim_when_idle(lambda: busy[0], 2))
        await asyncio.sleep(5)
        assert trims == [], "memory has not grown"
        busy[0], resident[0] = True, 300 * MIB
        await asyncio.sleep(4)
        assert trims == [], "requests are in flight"
        busy[0] = False
        await asyncio.sleep(2)
        assert trims == [300]
        await asyncio.sleep(6)
        assert trims == [300]
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    run_in_virtual_time(check())


def test_resident_memory_counts_touched_pages() -> None:
    before = memory.resident_memory()
    block = bytearray(b"x") * (64 * MIB)
    assert memory.resident_memory() - before > 32 * MIB
    assert len(block) == 64 * MIB
