"""Which adapters requests use, as vLLM tells it: names in the labels of one gauge."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress

from neso.engine.lora.config import LoraConfig
from neso.generation import GenerationRequest
from neso.server.metrics.registry import MetricsRegistry

_LABELS = ("model", "version", "max_lora", "running_lora_adapters", "waiting_lora_adapters")


class AdapterMetrics:
    """`vllm:lora_requests_info`: its value is the time of its last change; there is always one, the current."""

    def __init__(self, registry: MetricsRegistry, model: str, version: str, config: LoraConfig) -> None:
        self._gauge = registry.gauge("vllm:lora_requests_info", "Running stats on lora requests.", _LABELS)
        self._model = (model, version, str(config.max_loras))
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._labels: tuple[str, ...] = ()
        self._show()

    def arrived(self, name: str) -> None:
        """A request has come."""
        self._waiting[name] += 1
        self._show()

    def began(self, name: str) -> None:
        """A request that has arrived has its first token."""
        _leave(self._waiting, name)
        self._running[name] += 1
        self._show()

    def ended(self, name: str, *, had_begun: bool) -> None:
        """A request has gone."""
        _leave(self._running if had_begun else self._waiting, name)
        self._show()

    def close(self) -> None:
        """The model is unloaded."""
        with suppress(KeyError):  # one that has taken its place may have had the same labels
            self._gauge.remove(*self._labels)

    def _show(self) -> None:
        labels = (*self._model, _names(self._running), _names(self._waiting))
        if labels != self._labels:
            if self._labels:
                self.close()
            self._labels = labels
        self._gauge.labels(*labels).set(time.time())


def _leave(counts: Counter[str], name: str) -> None:
    """Clients make up names: one that nobody uses is forgotten."""
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


def _names(counts: Counter[str]) -> str:
    return ",".join(sorted(counts))


class AdapterUse:
    """Follows one request, if it has an adapter."""

    def __init__(self, metrics: AdapterMetrics | None, request: GenerationRequest) -> None:
        self._metrics = metrics if request.lora is not None else None
        self._name = request.lora.name if request.lora is not None else ""
        self._had_begun = False
        if self._metrics is not None:
            self._metrics.arrived(self._name)

    def began(self) -> None:
        """It has its first token."""
        self._had_begun = True
        if self._metrics is not None:
            self._metrics.began(self._name)

    def ended(self) -> None:
        """It has gone."""
        if self._metrics is not None:
            self._metrics.ended(self._name, had_begun=self._had_begun)
