"""Metrics of vLLM engines, from their step statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neso.backends import generation_metrics as families
from neso.backends.generation_metrics import GenerationMetrics
from neso.generation import FinishReason
from neso.server.metrics.registry import Family, ModelMetrics


class VllmMetrics:
    """Metrics of a vLLM engine. Created before the engine, which calls `record`. `close` removes gauges, not counters.

    `num_requests` returns the number of requests in flight. vLLM reports no step after the last request was aborted;
    therefore the last statistics are ignored if no requests are in flight.
    """

    def __init__(self, model: ModelMetrics, num_requests: Callable[[], int]) -> None:
        self._metrics = GenerationMetrics(model)
        self._num_requests = num_requests
        self._schedulers: dict[int, Any] = {}
        self._preemptions = self._queried = self._hit = 0
        reads: dict[Family, Callable[[], float]] = {
            families.REQUESTS_RUNNING: lambda: self._sum("num_running_reqs"),
            families.REQUESTS_WAITING: lambda: self._sum("num_waiting_reqs", "num_skipped_waiting_reqs"),
            families.KV_CACHE_USAGE: self._cache_usage,
            families.PREEMPTIONS: lambda: self._preemptions,
            families.PREFIX_QUERIES: lambda: self._queried,
            families.PREFIX_HITS: lambda: self._hit,
        }
        self._unwatch = [model.watch(family, read) for family, read in reads.items()]

    def close(self) -> None:
        """Remove the gauges of an unloaded model."""
        for unwatch in self._unwatch:
            unwatch()

    def record(self, scheduler: Any, iteration: Any, engine: int) -> None:
        """Record vLLM's `SchedulerStats` and `IterationStats` of a step; either may be None."""
        if scheduler is not None:
            self._schedulers[engine] = scheduler
            cache = scheduler.prefix_cache_stats
            if cache is not None:
                self._queried += cache.queries
                self._hit += cache.hits
        if iteration is not None:
            self._preemptions += iteration.num_preempted_reqs
            self._count(iteration)

    def _count(self, iteration: Any) -> None:
        metrics = self._metrics
        metrics.prompt_tokens.inc(iteration.num_prompt_tokens)
        metrics.generation_tokens.inc(iteration.num_generation_tokens)
        metrics.step_tokens.observe(iteration.num_prompt_tokens + iteration.num_generation_tokens)
        for seconds in iteration.time_to_first_tokens_iter:
            metrics.first_token.observe(seconds)
        for seconds in iteration.inter_token_latencies_iter:
            for histogram in metrics.per_token:
                histogram.observe(seconds)
        for n in iteration.n_params_iter:
            metrics.n.observe(n)
            metrics.best_of.observe(n)  # removed from vLLM, where it was equal to n
        for tokens in iteration.max_num_generation_tokens_iter:
            metrics.longest_generation.observe(tokens)
        for finished in iteration.finished_requests:
            self._finish(finished)

    def _finish(self, finished: Any) -> None:
        metrics = self._metrics
        metrics.finished[_reason(finished.finish_reason)].inc()
        metrics.request.observe(finished.e2e_latency)
        metrics.queue.observe(finished.queued_time)
        metrics.prefill.observe(finished.prefill_time)
        metrics.decode.observe(finished.decode_time)
        metrics.inference.observe(finished.inference_time)
        metrics.request_prompt_tokens.observe(finished.num_prompt_tokens)
        metrics.request_generation_tokens.observe(finished.num_generation_tokens)
        if finished.num_generation_tokens > 1:
            metrics.mean_per_token.observe(finished.decode_time / (finished.num_generation_tokens - 1))
        if finished.max_tokens_param is not None:
            metrics.max_tokens.observe(finished.max_tokens_param)
        # Not in all versions of vLLM.
        metrics.cached_tokens.inc(max(getattr(finished, "num_cached_tokens", 0), 0))
        metrics.preemptions.observe(getattr(finished, "num_preemptions", 0))

    def _sum(self, *fields: str) -> float:
        if not self._num_requests():
            return 0
        return sum(getattr(stats, field, 0) for stats in self._schedulers.values() for field in fields)

    def _cache_usage(self) -> float:
        """Return the maximum KV-cache usage of the engines."""
        if not self._num_requests():
            return 0.0
        return max((float(stats.kv_cache_usage) for stats in self._schedulers.values()), default=0.0)


def _reason(reason: Any) -> FinishReason:
    try:
        return FinishReason(str(reason))
    except ValueError:  # vLLM has additional finish reasons
        return FinishReason.STOP
