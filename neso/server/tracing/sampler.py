"""Chooses the requests that are traced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from neso.server.trace_config import TraceSetting
from neso.server.tracing.trace import Trace
from neso.server.tracing.trace_sink import TraceSink


class Sampler:
    """Applies one setting: every `rate`-th request, until there were `count`.

    Without a sink nothing can be traced. `joins`: requests that are part of a trace already are always taken.
    """

    def __init__(self, setting: TraceSetting, sink: TraceSink | None, *, joins: bool) -> None:
        self._setting = setting
        self._remaining = setting.count
        self._seen = 0
        self._joins = joins
        self._sink = sink if setting.level else None

    @property
    def active(self) -> bool:
        """Whether any request would be taken."""
        return self._sink is not None and (self._joins or (self._remaining != 0 and self._setting.rate > 0))

    @property
    def setting(self) -> TraceSetting:
        """The setting, with the count that is left."""
        return replace(self._setting, count=self._remaining)

    def sample(self, start: int = 0, parent: Any = None, *, join: bool = False) -> Trace | None:
        """A trace if this request is to have one; `join`: it is part of the one that `parent` stands for."""
        if self._sink is None or not (join or self._takes_next()):
            return None
        return Trace(self._setting.level & self._sink.levels, self._sink, parent, start)

    def retire(self) -> None:
        """The setting is no longer in force."""
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
