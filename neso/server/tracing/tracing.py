"""Tracing in the core: sampling, and the current global and per-model settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from neso.server.trace_config import OtelConfig, TraceConfig, TraceMode, TraceSetting
from neso.server.tracing.settings import Overrides, read_update
from neso.server.tracing.trace import Trace, TraceSink
from neso.server.tracing.trace_file import TraceBuffer, TraceFile

if TYPE_CHECKING:
    from neso.server.tracing.otel import OtelSink


class Sampler:
    """Applies one setting: samples every `rate`-th request, up to `count`.

    Without a sink, no request is sampled. `joins`: requests with a sampled parent context are always traced.
    """

    def __init__(self, setting: TraceSetting, sink: TraceSink | None, *, joins: bool) -> None:
        self._setting = setting
        self._remaining = setting.count
        self._seen = 0
        self._joins = joins
        self._sink = sink if setting.level else None

    @property
    def active(self) -> bool:
        """Whether any request can be sampled."""
        return self._sink is not None and (self._joins or (self._remaining != 0 and self._setting.rate > 0))

    @property
    def setting(self) -> TraceSetting:
        """The setting with the remaining count."""
        return replace(self._setting, count=self._remaining)

    def sample(self, start: int = 0, parent: Any = None, *, join: bool = False) -> Trace | None:
        """Return a trace if this request is sampled. `join`: it belongs to the sampled trace of `parent`."""
        if self._sink is None or not (join or self._takes_next()):
            return None
        return Trace(self._setting.level & self._sink.levels, self._sink, parent, start)

    def retire(self) -> None:
        """Called when the setting was replaced."""
        if self._sink is not None:
            self._sink.retire()

    def _takes_next(self) -> bool:
        rate = self._setting.rate
        if not rate or not self._remaining:
            return False
        self._seen += 1
        if self._seen % rate:
            return False
        if self._remaining > 0:
            self._remaining -= 1
        return True


logger = logging.getLogger(__name__)

GLOBAL = ""
"""Key of the global setting, in place of a model name."""

Header = Callable[[str], str | None]
"""Returns the value of a request header by its lower-case name."""


class Tracing:
    """Trace settings and sampling, used on the core's loop. Raises `Unsupported` if OpenTelemetry is not installed."""

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
        """Return a trace for a client request if it is sampled. Call only while `enabled`.

        `start`: start of the request, in ns of the monotonic clock. `header`: returns request headers; in mode
        `opentelemetry` a request with a sampled `traceparent` is always traced.
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
        """Return the settings of a model, or the global settings, in the format of the trace extension."""
        setting = (self._samplers.get(model) or self._samplers[GLOBAL]).setting
        settings: dict[str, str | list[str]] = {
            "trace_level": setting.level.names(),
            "trace_rate": str(setting.rate),
            "trace_count": str(setting.count),
            "trace_mode": self._config.mode.value,
        }
        if self._config.mode is TraceMode.TRITON:
            return settings | {"log_frequency": str(setting.log_frequency), "trace_file": self._config.file}
        return settings if self._otel is None else settings | self._otel.config.describe()

    def update(self, values: Mapping[str, Sequence[str]], model: str = GLOBAL) -> None:
        """Update the settings of a model, or the global settings, which apply to models without own settings.

        An empty value clears a setting. Atomic. Raises `ServerError`.
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
        """Write finished traces. Unfinished traces are lost."""
        self.enabled = False
        for sampler in self._samplers.values():
            sampler.retire()
        if self._file is not None:
            await asyncio.to_thread(self._file.close)
        if self._otel is not None:
            await asyncio.to_thread(self._otel.close)

    def _current(self, name: str) -> Overrides:
        """Return the overrides with the remaining count."""
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
            sink = TraceBuffer(setting, self._file)
        return Sampler(setting, sink, joins=self._otel is not None)

    def _refresh(self) -> None:
        self.enabled = any(sampler.active for sampler in self._samplers.values())


def _make_otel(config: TraceConfig) -> OtelSink | None:
    if config.mode is not TraceMode.OPENTELEMETRY:
        return None
    from neso.server.tracing.otel import OtelSink

    return OtelSink(config.otel or OtelConfig())
