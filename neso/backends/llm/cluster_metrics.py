"""Metrics of the work queue of a model on workers."""

from __future__ import annotations

from collections.abc import Callable

from neso.backends.member_metrics import MemberMetrics
from neso.cluster.front_end import ClusterChannel
from neso.cluster.work_queue import WorkerState
from neso.server.metrics.registry import Family, ModelMetrics


def _family(name: str, kind: str, help: str) -> Family:
    return Family(f"neso_cluster_{name}", kind, help)


CLUSTER_FAMILIES: dict[Family, Callable[[ClusterChannel], float]] = {
    _family("workers", "gauge", "Connected workers."): lambda c: len(c.workers),
    _family("queued_requests", "gauge", "Requests that wait for a worker."): lambda c: c.queue.num_waiting,
    _family("queue_oldest_seconds", "gauge", "Waiting time of the oldest request in the queue."): lambda c: (
        c.queue.oldest_wait
    ),
    _family(
        "queue_predicted_seconds", "gauge", "Time in which the workers can prefill the waiting requests."
    ): lambda c: c.predicted_wait,
    _family("grants_total", "counter", "Requests given to workers, each attempt counted."): lambda c: (
        c.counters.grants
    ),
    _family(
        "retries_total", "counter", "Requests that wait again because their worker was lost."
    ): lambda c: c.counters.retries,
    _family("lost_workers_total", "counter", "Workers that have left, ended or become silent."): lambda c: (
        c.counters.lost_workers
    ),
    _family("failed_requests_total", "counter", "Requests that have lost max_attempts workers."): lambda c: (
        c.counters.failed
    ),
    _family("stale_frames_total", "counter", "Outputs of earlier attempts that were dropped."): lambda c: (
        c.counters.stale_frames
    ),
    _family(
        "remote_prefills_total", "counter", "Prompts given to another worker than the one that decodes."
    ): lambda c: c.counters.remote_prefills,
    _family("imported_tokens_total", "counter", "Prompt tokens whose KV cache was transferred."): lambda c: (
        c.counters.imported_tokens
    ),
    _family(
        "fallbacks_total", "counter", "Long prompts that the worker that decodes has computed itself."
    ): lambda c: c.counters.fallbacks,
    _family("role_changes_total", "counter", "Changes of workers between prefill and decode."): lambda c: (
        c.counters.role_changes
    ),
}


def _worker_family(name: str, help: str) -> Family:
    return Family(f"neso_worker_{name}", "gauge", help, ("model", "version", "worker", "roles"))


WORKER_FAMILIES: dict[Family, Callable[[WorkerState], float]] = {
    _worker_family("requests", "Requests that the worker generates text for."): lambda w: len(w.jobs),
    _worker_family("exported_prompts", "Prompts that it computes, or holds, for other workers."): lambda w: (
        len(w.exports)
    ),
    _worker_family("prefill_tokens", "Prompt tokens that it has to compute."): lambda w: w.num_prefill_tokens,
    _worker_family("free_sequences", "Sequences for which it has asked."): lambda w: w.credits.sequences,
    _worker_family("kv_cache_usage", "Fraction of its KV cache in use."): lambda w: (
        w.stats.num_used_blocks / w.stats.num_blocks if w.stats.num_blocks else 0.0
    ),
    _worker_family(
        "prefix_blocks",
        "Blocks of its prefix cache that the server knows; an estimate if it does not report them.",
    ): lambda w: len(w.blocks),
    _worker_family("inter_token_seconds", "Measured time between two tokens of a sequence."): lambda w: w.itl,
    _worker_family("prefill_tokens_per_second", "Measured speed of its prefills, 0: not known."): lambda w: (
        1 / w.seconds_per_token if w.seconds_per_token else 0.0
    ),
}


def cluster_metrics(
    model: ModelMetrics, channel: ClusterChannel
) -> MemberMetrics[ClusterChannel, WorkerState]:
    """Return the metrics of a model's work queue and of its workers, labelled with their roles."""
    metrics = MemberMetrics(
        model,
        channel,
        CLUSTER_FAMILIES,
        lambda: [(worker, (worker.name, "+".join(sorted(worker.roles)))) for worker in channel.workers],
        lambda worker: WORKER_FAMILIES,
    )
    channel.connections.on_change(metrics.update)
    return metrics
