"""Metrics of the work queue of a model on workers."""

from __future__ import annotations

from collections.abc import Callable

from neso.cluster.front_end import ClusterChannel
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
    ): lambda c: c.queue.predicted_wait(c.workers),
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
}


class ClusterMetrics:
    """Values of a model's work queue, read at each scrape."""

    def __init__(self, model: ModelMetrics, channel: ClusterChannel) -> None:
        self._unwatch = [
            model.watch(family, lambda read=read: read(channel))  # type: ignore[misc]
            for family, read in CLUSTER_FAMILIES.items()
        ]

    def close(self) -> None:
        """Remove the values of an unloaded model."""
        for unwatch in self._unwatch:
            unwatch()
