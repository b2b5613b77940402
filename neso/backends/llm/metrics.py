"""Metrics of a language model, with the names of vLLM and TensorRT-LLM."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, get_args

from neso.backends import generation_metrics as families
from neso.backends.generation_metrics import GenerationMetrics
from neso.engine.client.async_engine import AsyncEngine
from neso.engine.core.stats import EngineStats, FallbackReason, KvTransferStats
from neso.engine.ipc.messages import EngineInfo
from neso.engine.lora.config import LoraConfig
from neso.generation import FinishReason, GenerationOutput, GenerationRequest
from neso.server.metrics.model_metrics import KV_CACHE_FAMILY
from neso.server.metrics.registry import Family, ModelMetrics

LENGTH_BUCKETS = (10, 50, 100, 500, 1000)
"""TensorRT-LLM's buckets of prompt and output lengths, in tokens."""

_LORA_REQUESTS = Family(
    "vllm:lora_requests_info",
    "gauge",
    "Running stats on lora requests.",
    ("model", "version", "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
)
_CACHE_CONFIG = Family(
    "vllm:cache_config_info",
    "gauge",
    "Information of the cache.",
    ("model", "version", "block_size", "num_gpu_blocks", "enable_prefix_caching"),
)
_DRAFTS = Family("vllm:spec_decode_num_drafts_total", "counter", "Number of speculative drafts.")
_DRAFT_TOKENS = Family("vllm:spec_decode_num_draft_tokens_total", "counter", "Number of draft tokens.")
_ACCEPTED_TOKENS = Family(
    "vllm:spec_decode_num_accepted_tokens_total", "counter", "Number of accepted draft tokens."
)
_ACCEPTED_PER_POSITION = Family(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "counter",
    "Accepted draft tokens, by their place in the draft.",
    ("model", "version", "position"),
)


def _processor_family(name: str, help: str) -> Family:
    return Family(f"neso_logits_processor_{name}_total", "counter", help, ("model", "version", "processor"))


_PROCESSOR_ROWS = _processor_family("rows", "Rows of logits that a logits processor has processed.")
_PROCESSOR_SECONDS = _processor_family("seconds", "Seconds spent in a logits processor.")
_PROCESSOR_FAILURES = _processor_family("failures", "Rows of logits for which a logits processor raised.")


def _trtllm_family(name: str, help: str, label: str) -> Family:
    return Family(name, "gauge", help, ("model", "version", label))


_REQUESTS = _trtllm_family("nv_trt_llm_request_metrics", "TRT LLM request metrics", "request_type")
_MEMORY = _trtllm_family("nv_trt_llm_runtime_memory_metrics", "TRT LLM runtime memory metrics", "memory_type")
_GENERAL = _trtllm_family("nv_trt_llm_general_metrics", "General TRT LLM metrics", "general_type")
_INFLIGHT_BATCHER = _trtllm_family(
    "nv_trt_llm_inflight_batcher_metrics",
    "TRT LLM inflight_batcher-specific metrics",
    "inflight_batcher_specific_metric",
)
_V1 = _trtllm_family("nv_trt_llm_v1_metrics", "TRT LLM v1-specific metrics", "v1_specific_metric")

_QUEUED = Family(
    "neso_group_queued_requests",
    "gauge",
    "Requests that wait until one of several engines has room for them.",
)


def _engine_family(name: str, kind: str, help: str) -> Family:
    return Family(f"neso_engine_{name}", kind, help, ("model", "version", "engine"))


_PER_ENGINE: dict[Family, Callable[[AsyncEngine], float]] = {
    _engine_family("up", "gauge", "Whether the engine is running."): lambda e: e.alive,
    _engine_family("requests", "gauge", "Requests in flight of the engine."): lambda e: e.num_requests,
    _engine_family("running_sequences", "gauge", "Sequences in execution."): lambda e: e.stats.num_running,
    _engine_family("kv_cache_usage", "gauge", "Fraction of the KV cache in use."): lambda e: _cache_usage(
        e.stats
    ),
    _engine_family("steps_total", "counter", "Steps of the engine."): lambda e: e.stats.step,
    _engine_family(
        "prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache of the engine."
    ): lambda e: e.stats.prefix_queried_tokens,
    _engine_family(
        "prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache of the engine."
    ): lambda e: e.stats.prefix_hit_tokens,
}
"""Values of each engine of a model; `engine` is its number."""

Read = Callable[[EngineStats], float]


def _transfer_family(name: str, help: str, kind: str = "counter", labels: tuple[str, ...] = ()) -> Family:
    return Family(f"neso_kv_transfer_{name}", kind, help, ("model", "version", *labels))


_TRANSFERS: dict[Family, Callable[[KvTransferStats], float]] = {
    _transfer_family("exports_total", "Prompts computed for another engine."): lambda t: t.exports,
    _transfer_family("imports_total", "Requests that got KV-cache blocks of another engine."): lambda t: (
        t.imports
    ),
    _transfer_family("bytes_total", "Bytes of blocks read from other engines."): lambda t: t.imported_bytes,
    _transfer_family("seconds_total", "Seconds spent reading blocks of other engines."): lambda t: (
        t.import_seconds
    ),
    _transfer_family("leases", "Prompts that are computed or kept for another engine.", "gauge"): lambda t: (
        t.leases
    ),
    _transfer_family("expired_leases_total", "Leases that ended without being released."): lambda t: (
        t.expired_leases
    ),
}
_TRANSFER_FALLBACKS = _transfer_family(
    "fallbacks_total",
    "Requests that computed a prompt themselves because its transfer failed.",
    labels=("reason",),
)
FALLBACK_REASONS: list[FallbackReason] = [
    reason for reason in get_args(FallbackReason) if reason != "aborted"
]


class Engines(Protocol):
    """The engines of a model: an `EngineGroup`, or those of a stage's workers."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def num_queued(self) -> int: ...
    @property
    def engines(self) -> Sequence[AsyncEngine]:
        """Those whose values are shown one by one."""


class EngineGauges:
    """Gauges and counters of the engines of a model, read at each scrape: sums, and a few for each engine.

    `iterations`: include TensorRT-LLM's statistics of iterations.
    """

    def __init__(self, model: ModelMetrics, engine: Engines, *, iterations: bool = True) -> None:
        self._model = model
        self._engine = engine
        self._unwatch: list[Callable[[], None]] = []
        info = engine.info
        self._watch_engines()
        self._watch_vllm(info)
        self._watch_speculation(info)
        self._watch_logits_processors(info)
        if info.kv_address:
            self._watch_transfers()
        if iterations:
            self._watch_tensorrt_llm(info)

    def close(self) -> None:
        """Remove the gauges of an unloaded model."""
        for unwatch in self._unwatch:
            unwatch()

    def _watch(self, family: Family, read: Read, *labels: str) -> None:
        engine = self._engine
        self._watch_value(family, lambda: read(engine.stats), *labels)

    def _watch_value(self, family: Family, read: Callable[[], float], *labels: str) -> None:
        self._unwatch.append(self._model.watch(family, read, *labels))

    def _watch_engines(self) -> None:
        group = self._engine
        self._watch_value(_QUEUED, lambda: group.num_queued)
        for number, engine in enumerate(group.engines):
            for family, read in _PER_ENGINE.items():
                self._watch_value(family, partial(read, engine), str(number))

    def _watch_vllm(self, info: EngineInfo) -> None:
        self._watch(families.REQUESTS_RUNNING, lambda s: s.num_running)
        self._watch(families.REQUESTS_WAITING, lambda s: s.num_waiting)
        self._watch(families.KV_CACHE_USAGE, _cache_usage)
        self._watch(families.PREEMPTIONS, lambda s: s.preemptions)
        self._watch(families.PREFIX_QUERIES, lambda s: s.prefix_queried_tokens)
        self._watch(families.PREFIX_HITS, lambda s: s.prefix_hit_tokens)
        # The values are in the labels, as in vLLM.
        cache = (info.block_size, info.num_blocks, info.enable_prefix_caching)
        self._watch(_CACHE_CONFIG, lambda s: 1, *map(str, cache))

    def _watch_speculation(self, info: EngineInfo) -> None:
        self._watch(_DRAFTS, lambda s: s.drafts.drafts)
        self._watch(_DRAFT_TOKENS, lambda s: s.drafts.draft_tokens)
        self._watch(_ACCEPTED_TOKENS, lambda s: s.drafts.accepted_tokens)
        for position in range(info.num_speculative_tokens):
            self._watch(_ACCEPTED_PER_POSITION, partial(_accepted_at, position), str(position))

    def _watch_logits_processors(self, info: EngineInfo) -> None:
        for name in info.logits_processors:
            counters = (
                (_PROCESSOR_ROWS, "rows"),
                (_PROCESSOR_SECONDS, "seconds"),
                (_PROCESSOR_FAILURES, "failures"),
            )
            for family, field in counters:
                self._watch(family, partial(_processor_counter, name, field), name)

    def _watch_transfers(self) -> None:
        for family, read in _TRANSFERS.items():
            self._watch(family, partial(_of_transfers, read))
        for reason in FALLBACK_REASONS:
            self._watch(_TRANSFER_FALLBACKS, partial(_fallbacks, reason), reason)

    def _watch_tensorrt_llm(self, info: EngineInfo) -> None:
        def watch_all(family: Family, reads: dict[str, Read]) -> None:
            for label, read in reads.items():
                self._watch(family, read, label)

        watch_all(
            _REQUESTS,
            {
                "active": lambda s: s.num_requests,
                "max": lambda s: info.max_num_seqs,
                "scheduled": lambda s: s.num_decoding + s.num_context,
                "context": lambda s: s.num_context,
                "waiting": lambda s: s.num_waiting,
            },
        )
        watch_all(
            _MEMORY,
            {"cpu": lambda s: s.host_memory, "gpu": lambda s: s.device_memory, "pinned": lambda s: 0},
        )
        watch_all(
            KV_CACHE_FAMILY,
            {
                "max": lambda s: s.num_blocks,
                "free": lambda s: s.num_blocks - s.num_used_blocks,
                "used": lambda s: s.num_used_blocks,
                "tokens_per": lambda s: info.block_size,
                "reused": lambda s: s.prefix_hit_tokens // info.block_size,
                "evicted": lambda s: s.prefix_evicted_blocks,
                "fraction": _cache_usage,
            },
        )
        watch_all(_GENERAL, {"iteration_counter": lambda s: s.step, "timestamp": lambda s: int(time.time())})
        if info.in_flight_batching:
            watch_all(
                _INFLIGHT_BATCHER,
                {
                    "generation_requests": lambda s: s.num_decoding,
                    "paused_requests": lambda s: s.num_paused,
                    "total_context_tokens": lambda s: s.num_context_tokens,
                    "micro_batch_id": lambda s: 0,
                },
            )
        else:
            watch_all(
                _V1,
                {
                    "total_context_tokens": lambda s: s.static_batch.num_context_tokens,
                    "total_generation_tokens": lambda s: s.static_batch.num_generation_tokens,
                    "empty_generation_slots": lambda s: s.static_batch.num_empty_slots,
                },
            )


def _of_transfers(read: Callable[[KvTransferStats], float], stats: EngineStats) -> float:
    return read(stats.kv_transfer)


def _fallbacks(reason: FallbackReason, stats: EngineStats) -> float:
    return stats.kv_transfer.fallbacks_by_reason.get(reason, 0)


def _accepted_at(position: int, stats: EngineStats) -> float:
    accepted = stats.drafts.accepted_at
    return accepted[position] if position < len(accepted) else 0


def _processor_counter(name: str, field: str, stats: EngineStats) -> float:
    counters = stats.logits_processors.get(name)
    return 0.0 if counters is None else float(getattr(counters, field))


def _cache_usage(stats: EngineStats) -> float:
    return stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0


class AdapterMetrics:
    """`vllm:lora_requests_info`: a gauge with adapter names in its labels, and the time of the last change as value."""

    def __init__(self, model: ModelMetrics, config: LoraConfig) -> None:
        self._model = model
        self._max_loras = str(config.max_loras)
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._labels: tuple[str, ...] = ()
        self._changed = 0.0
        self._unwatch: Callable[[], None] = lambda: None
        self._update()

    def add_waiting(self, name: str) -> None:
        """Count a new request."""
        self._waiting[name] += 1
        self._update()

    def start(self, name: str) -> None:
        """Count a waiting request as running."""
        _decrement(self._waiting, name)
        self._running[name] += 1
        self._update()

    def remove(self, name: str, *, started: bool) -> None:
        """Remove a request."""
        _decrement(self._running if started else self._waiting, name)
        self._update()

    def close(self) -> None:
        """Remove the gauge of an unloaded model."""
        self._unwatch()

    def _update(self) -> None:
        self._changed = time.time()
        labels = (self._max_loras, _names(self._running), _names(self._waiting))
        if labels != self._labels:
            self._labels = labels
            self._unwatch()
            self._unwatch = self._model.watch(_LORA_REQUESTS, lambda: self._changed, *labels)


def _decrement(counts: Counter[str], name: str) -> None:
    """Decrement a count. Removes names without requests, because clients choose the names."""
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


def _names(counts: Counter[str]) -> str:
    return ",".join(sorted(counts))


class LlmMetrics(GenerationMetrics):
    """Metrics of a model's requests, and gauges of its engine. `counts_steps`: also count the engine's steps."""

    def __init__(
        self,
        model: ModelMetrics,
        engine: Engines,
        *,
        iterations: bool = True,
        counts_steps: bool = True,
    ) -> None:
        super().__init__(model)
        lora = engine.info.lora
        self.adapters = AdapterMetrics(model, lora) if lora.enabled else None
        self._make_gauges = partial(EngineGauges, model, engine, iterations=iterations)
        self._gauges = self._make_gauges()
        self._steps = [0] * len(engine.engines)
        for number, one in enumerate(engine.engines if counts_steps else ()):
            one.on_stats(partial(self.observe_step, number))
        self.input_length, self.output_length = (
            model.histogram(
                Family(
                    f"nv_llm_{direction}_token_len",
                    "histogram",
                    "TRT LLM response metrics",
                    ("model", "version", "response_metric_type"),
                    LENGTH_BUCKETS,
                ),
                f"total_{direction}_tokens",
            )
            for direction in ("input", "output")
        )

    def observe_step(self, number: int, stats: EngineStats) -> None:
        """Record the statistics of an engine, which are also sent between steps."""
        if stats.step > self._steps[number]:
            self._steps[number] = stats.step
            self.step_tokens.observe(stats.num_batched_tokens)

    def replace_engine(self) -> None:
        """Use the properties of a restarted engine: the size of its cache can be different."""
        self._gauges.close()
        self._gauges = self._make_gauges()

    def close(self) -> None:
        """Remove the gauges of an unloaded model; counters and histograms stay."""
        self._gauges.close()
        if self.adapters is not None:
            self.adapters.close()


class RequestTimer:
    """Measures one request. Always call `end` after the last output."""

    def __init__(self, metrics: LlmMetrics, request: GenerationRequest) -> None:
        self._metrics = metrics
        self._adapters = metrics.adapters if request.lora is not None else None
        self._adapter = request.lora.name if request.lora is not None else ""
        if self._adapters is not None:
            self._adapters.add_waiting(self._adapter)
        self._sampling = request.sampling
        self._arrived = self._last = time.monotonic_ns()
        self._scheduled = self._first = 0
        self._tokens: list[int] = []
        self._output: GenerationOutput | None = None

    def observe(self, output: GenerationOutput) -> None:
        """Record an output."""
        now, metrics = time.monotonic_ns(), self._metrics
        if self._output is None:
            self._first = now
            if self._adapters is not None:
                self._adapters.start(self._adapter)
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
        """Record the end of the request. `reason` applies if its last output was not final; None: not counted."""
        last, metrics = self._output, self._metrics
        if self._adapters is not None:
            self._adapters.remove(self._adapter, started=last is not None)
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
