"""The metrics of a language model's requests and steps, by vLLM's names and buckets; lengths also by TensorRT-LLM's."""

from __future__ import annotations

import time
from collections.abc import Callable

from neso.backends.generation_metrics import GenerationMetrics
from neso.backends.llm.adapter_metrics import AdapterMetrics, AdapterUse
from neso.backends.llm.engine_gauges import EngineGauges
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import EngineInfo
from neso.generation import FinishReason, GenerationOutput, GenerationRequest
from neso.server.metrics.registry import MetricsRegistry

LENGTH_BUCKETS = (10, 50, 100, 500, 1000)
"""TensorRT-LLM's, of tokens."""


class LlmMetrics(GenerationMetrics):
    """The metrics of one model's requests, and the gauges of its engine."""

    def __init__(
        self,
        registry: MetricsRegistry,
        model: str,
        version: str,
        stats: Callable[[], EngineStats],
        info: EngineInfo,
    ) -> None:
        super().__init__(registry, model, version)
        self.adapters = AdapterMetrics(registry, model, version, info.lora) if info.lora.enabled else None
        self._gauges = EngineGauges(registry, model, version, stats, info)
        self._steps = 0
        self.input_length, self.output_length = (
            registry.histogram(
                f"nv_llm_{what}_token_len",
                "TRT LLM response metrics",
                ("model", "version", "response_metric_type"),
                LENGTH_BUCKETS,
            ).labels(model, version, f"total_{what}_tokens")
            for what in ("input", "output")
        )

    def observe_step(self, stats: EngineStats) -> None:
        """The engine has told of a step, or of something between two."""
        if stats.step > self._steps:
            self._steps = stats.step
            self.step_tokens.observe(stats.num_batched_tokens)

    def close(self) -> None:
        """Forget the gauges of a model that is unloaded; what was counted stays."""
        self._gauges.close()
        if self.adapters is not None:
            self.adapters.close()


class RequestTimer:
    """Measures one request on its way out. `end` comes after the last output, whatever was the last."""

    def __init__(self, metrics: LlmMetrics, request: GenerationRequest) -> None:
        self._metrics = metrics
        self._adapter = AdapterUse(metrics.adapters, request)
        self._sampling = request.sampling
        self._arrived = self._last = time.monotonic_ns()
        self._scheduled = self._first = 0
        self._tokens: list[int] = []
        self._output: GenerationOutput | None = None

    def observe(self, output: GenerationOutput) -> None:
        """An output has come."""
        now, metrics = time.monotonic_ns(), self._metrics
        if self._output is None:
            self._first = now
            self._adapter.began()
            self._scheduled = output.scheduled_ns or self._arrived
            self._tokens = [0] * output.num_sequences
            metrics.first_token.observe((now - self._arrived) / 1e9)
            metrics.prompt_tokens.inc(output.usage.prompt_tokens)
            metrics.cached_tokens.inc(output.usage.cached_tokens)
        else:
            for histogram in metrics.per_token:
                histogram.observe((now - self._last) / 1e9)
        new = 0
        for delta in output.deltas:
            new += len(delta.token_ids)
            self._tokens[delta.index] += len(delta.token_ids)
        metrics.generation_tokens.inc(new)
        self._output, self._last = output, now

    def end(self, reason: FinishReason | None) -> None:
        """The request is over: by itself, or for `reason` if its last output was not the end; None: not counted."""
        last, metrics = self._output, self._metrics
        self._adapter.ended()
        if last is None or not last.finished:
            if reason is not None:
                metrics.finished[reason].inc()
            return
        metrics.finished[last.deltas[-1].finish_reason or FinishReason.STOP].inc()
        metrics.request.observe((self._last - self._arrived) / 1e9)
        metrics.queue.observe((self._scheduled - self._arrived) / 1e9)
        metrics.prefill.observe((self._first - self._scheduled) / 1e9)
        metrics.decode.observe((self._last - self._first) / 1e9)
        metrics.inference.observe((self._last - self._scheduled) / 1e9)
        if max(self._tokens) > 1:
            metrics.mean_per_token.observe((self._last - self._first) / 1e9 / (max(self._tokens) - 1))
        metrics.request_prompt_tokens.observe(last.usage.prompt_tokens)
        metrics.request_generation_tokens.observe(last.usage.completion_tokens)
        metrics.input_length.observe(last.usage.prompt_tokens)
        metrics.output_length.observe(last.usage.completion_tokens)
        metrics.longest_generation.observe(max(self._tokens))
        if self._sampling.max_tokens is not None:
            metrics.max_tokens.observe(self._sampling.max_tokens)
        metrics.n.observe(self._sampling.n)
        metrics.best_of.observe(self._sampling.num_sequences)
        metrics.preemptions.observe(last.preemptions)
