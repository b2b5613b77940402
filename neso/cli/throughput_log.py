"""Logs the load of each language model every few seconds, while it has requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping

from neso.backends import generation_metrics as families
from neso.server.core import Core
from neso.server.metrics.registry import MetricsRegistry, sample_key

logger = logging.getLogger("neso.throughput")

_PROMPT, _GENERATED = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
_DRAFTED, _ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
_COUNTERS = (
    _PROMPT,
    _GENERATED,
    _DRAFTED,
    _ACCEPTED,
    families.PREFIX_QUERIES.name,
    families.PREFIX_HITS.name,
    families.PREEMPTIONS.name,
)
_GAUGES = (families.REQUESTS_RUNNING.name, families.REQUESTS_WAITING.name, families.KV_CACHE_USAGE.name)

Model = tuple[str, str]
"""Name and version."""


class Values(defaultdict[str, float]):
    """Values of a model by name of the metric; 0 for a metric that it does not have."""

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        super().__init__(float, values or {})


class ThroughputLog:
    """Compares the metrics of each model with those of the last call of `lines`."""

    def __init__(self, metrics: MetricsRegistry) -> None:
        self._metrics = metrics
        self._last: dict[Model, Values] = {}
        self._at = time.monotonic()

    def lines(self) -> list[str]:
        """Return a line for each model that has, or had, requests since the last call."""
        now, values = time.monotonic(), self._read()
        seconds, self._at = now - self._at, now
        last, self._last = self._last, values
        lines = (_line(model[0], last.get(model, Values()), values[model], seconds) for model in values)
        return [line for line in lines if line is not None]

    def _read(self) -> dict[Model, Values]:
        models: defaultdict[Model, Values] = defaultdict(Values)
        others = self._metrics.in_other_processes()
        for name in (*_COUNTERS, *_GAUGES):
            for sample in self._metrics.samples(name):
                if sample.name == name:  # not the time at which a counter was created
                    value = sample.value + others.get(sample_key(sample), 0.0)
                    models[sample.labels["model"], sample.labels["version"]][name] += value
        return dict(models)


def _line(model: str, last: Values, now: Values, seconds: float) -> str | None:
    """Describe the load of a model in `seconds` between two readings; None if it had none."""
    new = Values({name: now[name] - last[name] for name in _COUNTERS})
    running, waiting, cache = (now[name] for name in _GAUGES)
    if not (running or waiting or new[_PROMPT] or new[_GENERATED]):
        return None
    return ", ".join(
        (f"{model}: {running:.0f} running", f"{waiting:.0f} waiting", *_details(new, seconds, cache))
    )


def _details(new: Values, seconds: float, cache: float) -> Iterator[str]:
    if seconds > 0:
        yield f"{new[_PROMPT] / seconds:.1f} prompt tokens/s"
        yield f"{new[_GENERATED] / seconds:.1f} generated tokens/s"
    yield f"KV cache {cache:.1%} used"
    if new[families.PREFIX_QUERIES.name]:
        hits = new[families.PREFIX_HITS.name] / new[families.PREFIX_QUERIES.name]
        yield f"{hits:.1%} of prompt tokens from the prefix cache"
    if new[_DRAFTED]:
        yield f"{new[_ACCEPTED] / new[_DRAFTED]:.1%} of draft tokens accepted"
    if new[families.PREEMPTIONS.name]:
        yield f"{new[families.PREEMPTIONS.name]:.0f} preemptions"


async def log_throughput(core: Core, interval: float) -> None:
    """Log a line for each busy model every `interval` seconds, until cancelled."""
    log = ThroughputLog(core.metrics)
    log.lines()
    while True:
        await asyncio.sleep(interval)
        if core.front_ends is not None:
            await core.front_ends.synchronize()
        for line in log.lines():
            logger.info(line)
