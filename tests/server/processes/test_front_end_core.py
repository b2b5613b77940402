"""`FrontEndCore`: what a front-end process tells the main process."""

from __future__ import annotations

import asyncio
from typing import cast

from virtual_time import VirtualTime

from neso.server.admission import Admission, AdmissionLimits
from neso.server.metrics.registry import Family
from neso.server.options import ServerOptions
from neso.server.processes.channel import Channel
from neso.server.processes.front_end_core import TOTALS_INTERVAL, FrontEndCore
from neso.server.processes.totals import ProcessTotals


class Notified:
    """A channel that keeps the reported values."""

    def __init__(self) -> None:
        self.values: list[list[float]] = []

    def notify(self, operation: str, totals: ProcessTotals) -> None:
        assert operation == "totals"
        self.values.append(list(totals.samples.values()))


async def test_counts_are_reported_when_they_have_changed(virtual_time: VirtualTime):
    core = FrontEndCore(ServerOptions(), Admission(AdmissionLimits()))
    channel = Notified()
    core.forwarder.channel = cast(Channel, channel)
    counter = core.metrics.counter(Family("tokens", "counter", "Tokens.", ()))
    reporting = asyncio.create_task(core.report_totals())
    counter.inc(2)
    await asyncio.sleep(1.5 * TOTALS_INTERVAL)
    assert channel.values == [[2]]
    await asyncio.sleep(3 * TOTALS_INTERVAL)
    assert channel.values == [[2]]
    counter.inc()
    await asyncio.sleep(TOTALS_INTERVAL)
    assert channel.values == [[2], [3]]
    reporting.cancel()
