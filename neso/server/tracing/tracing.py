"""Tracing as the core knows it: the settings in force, globally and by model, and the traces that they give."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from neso.server.trace_config import OtelConfig, TraceConfig, TraceMode, TraceSetting
from neso.server.tracing.collection import Collection
from neso.server.tracing.sampler import Sampler
from neso.server.tracing.trace import Trace
from neso.server.tracing.trace_file import TraceFile
from neso.server.tracing.trace_sink import TraceSink
from neso.server.tracing.update import Overrides, read_update

if TYPE_CHECKING:
    from neso.server.tracing.otel_sink import OtelSink

logger = logging.getLogger(__name__)

GLOBAL = ""
"""Stands for the global setting among the names of models."""

Header = Callable[[str], str | None]
"""The value of a header of the request, by its name in lower case."""


class Tracing:
    """Belongs to the core's loop. Raises `Unsupported` when OpenTelemetry is asked for and not installed."""

    def __init__(self, config: TraceConfig) -> None:
        self._config = config
        self._file = TraceFile(config.file) if config.mode is TraceMode.TRITON and config.file else None
        self._otel = _make_otel(config)
        self._overrides: dict[str, Overrides] = {}
        self._samplers = {GLOBAL: self._make_sampler(config.setting)}
        self.enabled = self._samplers[GLOBAL].active
        if config.setting.level and not self.enabled:
            logger.warning(
                "nothing is traced: %s", config.setting.fault(config.mode, config.file) or "count is 0"
            )

    def sample(self, model: str, header: Header | None = None, start: int = 0) -> Trace | None:
        """A trace for a client's request to a model if it is to be traced. Ask only while `enabled`.

        `start`: when the request began, in ns of the monotonic clock. `header` gives its headers: in mode
        `opentelemetry` a sampled `traceparent` is always followed.
        """
        sampler = self._samplers.get(model) or self._samplers[GLOBAL]
        if self._otel is None or header is None:
            trace = sampler.sample(start)
        else:
            parent = self._otel.parent(header)
            trace = sampler.sample(start, parent, join=self._otel.is_sampled(parent))
        if trace is not None and not sampler.active:
            self._refresh()
        return trace

    def settings(self, model: str = GLOBAL) -> dict[str, str | list[str]]:
        """The settings of a model, or the global ones, as the trace extension tells them."""
        setting = (self._samplers.get(model) or self._samplers[GLOBAL]).setting
        told: dict[str, str | list[str]] = {
            "trace_level": setting.level.names(),
            "trace_rate": str(setting.rate),
            "trace_count": str(setting.count),
            "trace_mode": self._config.mode.value,
        }
        if self._config.mode is TraceMode.TRITON:
            return told | {"log_frequency": str(setting.log_frequency), "trace_file": self._config.file}
        return told if self._otel is None else told | self._otel.config.describe()

    def update(self, values: Mapping[str, Sequence[str]], model: str = GLOBAL) -> None:
        """Change settings of a model, or the global ones, which models have where they have none of their own.

        A setting without a value is cleared. All is changed or nothing. Raises `ServerError`.
        """
        changes = read_update(values, self._config.mode)
        if not changes:
            return
        changed = {model: replace(self._current(model), **changes)}
        if model == GLOBAL:
            changed |= {name: self._current(name) for name in self._overrides if name != GLOBAL}
        settings: dict[str, TraceSetting] = {}
        for name, own in changed.items():
            base = settings.get(GLOBAL) or self._samplers[GLOBAL].setting
            settings[name] = own.over(self._config.setting if name == GLOBAL else base)
            settings[name].check(self._config.mode, self._config.file)
        for name, own in changed.items():
            self._put(name, own, settings[name])
        self._refresh()

    async def close(self) -> None:
        """Write what is not written yet. Traces that are still open are lost."""
        self.enabled = False
        for sampler in self._samplers.values():
            sampler.retire()
        if self._file is not None:
            await asyncio.to_thread(self._file.close)
        if self._otel is not None:
            await asyncio.to_thread(self._otel.close)

    def _current(self, name: str) -> Overrides:
        """The overrides, with the count that is left."""
        overrides = self._overrides.get(name, Overrides())
        if overrides.count is None:
            return overrides
        return replace(overrides, count=self._samplers[name].setting.count)

    def _put(self, name: str, overrides: Overrides, setting: TraceSetting) -> None:
        old = self._samplers.pop(name, None)
        self._overrides[name] = overrides
        if overrides or name == GLOBAL:
            self._samplers[name] = self._make_sampler(setting)
        else:
            del self._overrides[name]
        if old is not None:
            old.retire()

    def _make_sampler(self, setting: TraceSetting) -> Sampler:
        sink: TraceSink | None = self._otel
        if self._file is not None and not setting.fault(self._config.mode, self._config.file):
            sink = Collection(setting, self._file)
        return Sampler(setting, sink, joins=self._otel is not None)

    def _refresh(self) -> None:
        self.enabled = any(sampler.active for sampler in self._samplers.values())


def _make_otel(config: TraceConfig) -> OtelSink | None:
    if config.mode is not TraceMode.OPENTELEMETRY:
        return None
    from neso.server.tracing.otel_sink import OtelSink

    return OtelSink(config.otel or OtelConfig())
