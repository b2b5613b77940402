"""Concurrent requests with the arrival times of their chunks."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Prompt = TypeVar("Prompt")


@dataclass
class Measured:
    """Arrival times (s) of the chunks of each response; each response has `tokens` tokens."""

    tokens: int
    seconds: float = 0.0
    arrivals: list[list[float]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return len(self.arrivals) * self.tokens / self.seconds

    @property
    def itl_ms(self) -> float:
        """Median over the requests of the mean time between two chunks."""
        means = [(times[-1] - times[0]) / (len(times) - 1) for times in self.arrivals if len(times) > 1]
        return 1e3 * statistics.median(means)


async def run(
    concurrency: int, prompts: Sequence[Prompt], one: Callable[[Prompt], Awaitable[list[float]]], tokens: int
) -> Measured:
    """Run all prompts with `concurrency` workers; `one(prompt)` returns the arrival times of a response."""
    measured, waiting = Measured(tokens), iter(prompts)

    async def worker() -> None:
        for prompt in waiting:
            measured.arrivals.append(await one(prompt))

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    measured.seconds = time.perf_counter() - started
    return measured
