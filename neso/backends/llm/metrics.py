"""The metrics of a language model's requests and steps, by vLLM's names and buckets; lengths also by TensorRT-LLM's."""

from __future__ import annotations

import time
from collections.abc import Callable

from neso.backends.llm.adapter_metrics import AdapterMetrics, AdapterUse
from neso.backends.llm.engine_gauges import EngineGauges
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import EngineInfo
from neso.generation import FinishReason, GenerationOutput, GenerationRequest
from neso.server.metrics import MetricsRegistry

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
LENGTH_BUCKETS = (10, 50, 100, 500, 1000)
"""TensorRT-LLM's, of tokens."""


class LlmMetrics:
    """Counters and histograms of one model, and the gauges of its engine."""

    def __init__(
        self,
        registry: MetricsRegistry,
        model: str,
        version: str,
        stats: Callable[[], EngineStats],
        info: EngineInfo,
    ) -> None:
        labels = (model, version)
        self.adapters = AdapterMetrics(registry, model, version, info.lora) if info.lora.enabled else None
        self._gauges = EngineGauges(registry, model, version, stats, info)
        self._steps = 0

        def counter(name: str, help: str):  # type: ignore[no-untyped-def]
            return registry.counter(f"vllm:{name}", help).labels(*labels)

        def histogram(name: str, help: str, buckets: tuple[float, ...]):  # type: ignore[no-untyped-def]
            return registry.histogram(f"vllm:{name}", help, buckets=buckets).labels(*labels)

        def seconds(name: str, what: str, buckets: tuple[float, ...] = REQUEST_BUCKETS):  # type: ignore[no-untyped-def]
            return histogram(name, f"Histogram of {what} in seconds.", buckets)

        success = registry.counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            ("model", "version", "finished_reason"),
        )
        self.finished = {reason: success.labels(*labels, reason.value) for reason in FinishReason}
        self.prompt_tokens = counter("prompt_tokens", "Number of prefill tokens processed.")
        self.cached_tokens = counter("prompt_tokens_cached", "Number of prompt tokens found in the cache.")
        self.generation_tokens = counter("generation_tokens", "Number of generation tokens processed.")
        self.first_token = seconds("time_to_first_token_seconds", "time to first token", FIRST_TOKEN_BUCKETS)
        self.per_token = [
            seconds("inter_token_latency_seconds", "inter-token latency", PER_TOKEN_BUCKETS),
            seconds("time_per_output_token_seconds", "time per output token", PER_TOKEN_BUCKETS),
        ]
        self.mean_per_token = seconds(
            "request_time_per_output_token_seconds",
            "mean time per output token of a request",
            PER_TOKEN_BUCKETS,
        )
        self.request = seconds("e2e_request_latency_seconds", "end to end request latency")
        self.queue = seconds("request_queue_time_seconds", "time spent in the waiting phase")
        self.prefill = seconds("request_prefill_time_seconds", "time spent in the prefill phase")
        self.decode = seconds("request_decode_time_seconds", "time spent in the decode phase")
        self.inference = seconds("request_inference_time_seconds", "time spent in the running phase")
        self.request_prompt_tokens = histogram(
            "request_prompt_tokens", "Number of prefill tokens processed.", COUNT_BUCKETS
        )
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Number of generation tokens processed.", COUNT_BUCKETS
        )
        self.longest_generation = histogram(
            "request_max_num_generation_tokens",
            "Histogram of maximum number of requested generation tokens.",
            COUNT_BUCKETS,
        )
        self.max_tokens = histogram(
            "request_params_max_tokens", "Histogram of the max_tokens request parameter.", COUNT_BUCKETS
        )
        self.best_of = histogram(
            "request_params_best_of", "Histogram of the best_of request parameter.", N_BUCKETS
        )
        self.n = histogram("request_params_n", "Histogram of the n request parameter.", N_BUCKETS)
        self.preemptions = histogram(
            "request_preemptions", "Histogram of how often a request had to start over.", (0, *N_BUCKETS)
        )
        self.input_length, self.output_length = (
            registry.histogram(
                f"nv_llm_{what}_token_len",
                "TRT LLM response metrics",
                ("model", "version", "response_metric_type"),
                LENGTH_BUCKETS,
            ).labels(*labels, f"total_{what}_tokens")
            for what in ("input", "output")
        )
        self.step_tokens = histogram(
            "iteration_tokens_total", "Histogram of number of tokens per engine step.", STEP_BUCKETS
        )

    def observe_step(self, stats: EngineStats) -> None:
        """The engine has told of a step, or of something between two."""
        if stats.step > self._steps:
            self._steps = stats.step
            self.step_tokens.observe(stats.num_batched_tokens)

    def observe_pooled(self, num_prompt_tokens: int, seconds: float) -> None:
        """A prompt became a vector."""
        self.prompt_tokens.inc(num_prompt_tokens)
        self.request_prompt_tokens.observe(num_prompt_tokens)
        self.request.observe(seconds)

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
