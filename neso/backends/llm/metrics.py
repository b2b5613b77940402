"""Metrics of a language model: requests and steps with vLLM's names, gauges with vLLM's and TensorRT-LLM's."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from neso.backends.generation_metrics import ENGINE_FAMILIES, GenerationMetrics
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import EngineInfo
from neso.engine.lora.config import LoraConfig
from neso.generation import FinishReason, GenerationOutput, GenerationRequest
from neso.server.metrics.kv_cache import FAMILY as KV_CACHE_FAMILY
from neso.server.metrics.kv_cache import LABEL as KV_CACHE_LABEL
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


Read = Callable[[EngineStats], float]


class EngineGauges:
    """Reads `stats` when they are scraped."""

    def __init__(
        self,
        registry: MetricsRegistry,
        model: str,
        version: str,
        stats: Callable[[], EngineStats],
        info: EngineInfo,
    ) -> None:
        self._registry, self._model, self._version = registry, model, version
        self._stats = stats
        self._unwatch: list[Callable[[], None]] = []
        self._vllm(info)
        self._speculation(info)
        self._tensorrt_llm(info)

    def close(self) -> None:
        """Forget the gauges of a model that is unloaded."""
        for unwatch in self._unwatch:
            unwatch()

    def _watch(self, name: str, help: str, read: Read, **further: str) -> None:
        stats = self._stats
        self._unwatch.append(
            self._registry.watch(name, help, self._model, self._version, lambda: read(stats()), **further)
        )

    def _vllm(self, info: EngineInfo) -> None:
        reads: dict[str, Read] = {
            "num_requests_running": lambda s: s.num_running,
            "num_requests_waiting": lambda s: s.num_waiting,
            "kv_cache_usage_perc": _used_share,
            "num_preemptions_total": lambda s: s.preemptions,
            "prefix_cache_queries_total": lambda s: s.prefix_queried_tokens,
            "prefix_cache_hits_total": lambda s: s.prefix_hit_tokens,
        }
        for name, read in reads.items():
            self._watch(f"vllm:{name}", ENGINE_FAMILIES[f"vllm:{name}"], read)
        # The values are in the labels, as in vLLM.
        self._watch(
            "vllm:cache_config_info",
            "Information of the cache.",
            lambda s: 1,
            block_size=str(info.block_size),
            num_gpu_blocks=str(info.num_blocks),
            enable_prefix_caching=str(info.enable_prefix_caching),
        )

    def _speculation(self, info: EngineInfo) -> None:
        counters: dict[str, tuple[str, Read]] = {
            "num_drafts": ("Number of speculative drafts.", lambda s: s.drafts.drafts),
            "num_draft_tokens": ("Number of draft tokens.", lambda s: s.drafts.draft_tokens),
            "num_accepted_tokens": ("Number of accepted draft tokens.", lambda s: s.drafts.accepted_tokens),
        }
        for name, (help, read) in counters.items():
            self._watch(f"vllm:spec_decode_{name}_total", help, read)
        for place in range(info.num_speculative_tokens):
            self._watch(
                "vllm:spec_decode_num_accepted_tokens_per_pos_total",
                "Accepted draft tokens, by their place in the draft.",
                partial(_accepted_at, place),
                position=str(place),
            )

    def _tensorrt_llm(self, info: EngineInfo) -> None:
        def family(name: str, help: str, label: str, members: dict[str, Read]) -> None:
            for kind, read in members.items():
                self._watch(name, help, read, **{label: kind})

        family(
            "nv_trt_llm_request_metrics",
            "TRT LLM request metrics",
            "request_type",
            {
                "active": lambda s: s.num_requests,
                "max": lambda s: info.max_num_seqs,
                "scheduled": lambda s: s.num_decoding + s.num_context,
                "context": lambda s: s.num_context,
                "waiting": lambda s: s.num_waiting,
            },
        )
        family(
            "nv_trt_llm_runtime_memory_metrics",
            "TRT LLM runtime memory metrics",
            "memory_type",
            {"cpu": lambda s: s.host_memory, "gpu": lambda s: s.device_memory, "pinned": lambda s: 0},
        )
        family(
            KV_CACHE_FAMILY,
            "TRT LLM KV cache block metrics",
            KV_CACHE_LABEL,
            {
                "max": lambda s: s.num_blocks,
                "free": lambda s: s.num_blocks - s.num_used_blocks,
                "used": lambda s: s.num_used_blocks,
                "tokens_per": lambda s: info.block_size,
                "reused": lambda s: s.prefix_hit_tokens // info.block_size,
                "evicted": lambda s: s.prefix_evicted_blocks,
                "fraction": _used_share,
            },
        )
        family(
            "nv_trt_llm_general_metrics",
            "General TRT LLM metrics",
            "general_type",
            {"iteration_counter": lambda s: s.step, "timestamp": lambda s: int(time.time())},
        )
        if info.in_flight_batching:
            family(
                "nv_trt_llm_inflight_batcher_metrics",
                "TRT LLM inflight_batcher-specific metrics",
                "inflight_batcher_specific_metric",
                {
                    "generation_requests": lambda s: s.num_decoding,
                    "paused_requests": lambda s: s.num_paused,
                    "total_context_tokens": lambda s: s.num_context_tokens,
                    "micro_batch_id": lambda s: 0,
                },
            )
        else:
            family(
                "nv_trt_llm_v1_metrics",
                "TRT LLM v1-specific metrics",
                "v1_specific_metric",
                {
                    "total_context_tokens": lambda s: s.num_context_tokens,
                    "total_generation_tokens": lambda s: s.num_batched_tokens - s.num_context_tokens,
                    "empty_generation_slots": lambda s: info.max_num_seqs - s.num_running,
                },
            )


def _accepted_at(place: int, stats: EngineStats) -> float:
    accepted = stats.drafts.accepted_at
    return accepted[place] if place < len(accepted) else 0


def _used_share(stats: EngineStats) -> float:
    return stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0


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
