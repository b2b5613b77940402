"""Text-generation metrics with vLLM's names and buckets, shared by the backends of language models."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from neso.generation import FinishReason
from neso.server.metrics.registry import Family, ModelMetrics

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

REQUESTS_RUNNING = Family("vllm:num_requests_running", "gauge", "Number of sequences in execution.")
REQUESTS_WAITING = Family(
    "vllm:num_requests_waiting", "gauge", "Number of sequences waiting to be processed."
)
KV_CACHE_USAGE = Family("vllm:kv_cache_usage_perc", "gauge", "KV cache usage. 1 means 100 percent usage.")
PREEMPTIONS = Family("vllm:num_preemptions_total", "counter", "Cumulative number of preemptions.")
PREFIX_QUERIES = Family(
    "vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache."
)
PREFIX_HITS = Family("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.")
"""State of an engine, read at each scrape."""


class GenerationMetrics:
    """Counters and histograms of one model."""

    def __init__(self, model: ModelMetrics) -> None:
        def counter(name: str, help: str) -> Counter:
            return model.counter(Family(f"vllm:{name}_total", "counter", help))

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return model.histogram(Family(f"vllm:{name}", "histogram", help, buckets=buckets))

        def seconds(name: str, duration: str, buckets: tuple[float, ...] = REQUEST_BUCKETS) -> Histogram:
            return histogram(name, f"Histogram of {duration} in seconds.", buckets)

        success = Family(
            "vllm:request_success_total",
            "counter",
            "Count of successfully processed requests.",
            ("model", "version", "finished_reason"),
        )
        self.finished = {reason: model.counter(success, reason.value) for reason in FinishReason}
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
        self.step_tokens = histogram(
            "iteration_tokens_total", "Histogram of number of tokens per engine step.", STEP_BUCKETS
        )

    def observe_pooled(self, num_prompt_tokens: int, seconds: float) -> None:
        """Record a finished request for embeddings or scores."""
        self.prompt_tokens.inc(num_prompt_tokens)
        self.request_prompt_tokens.observe(num_prompt_tokens)
        self.request.observe(seconds)
