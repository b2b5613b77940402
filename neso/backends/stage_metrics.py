"""Metrics of a stage: its queue and its workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from neso.cluster.stages.stage import Stage, StageWorker
from neso.server.metrics.registry import Family, ModelMetrics


def _family(name: str, kind: str, help: str) -> Family:
    return Family(f"neso_stage_{name}", kind, help)


STAGE_FAMILIES: dict[Family, Callable[[Stage], float]] = {
    _family("workers", "gauge", "Connected workers of a stage."): lambda s: len(s.workers),
    _family("queued_requests", "gauge", "Requests that wait for a worker of the stage."): lambda s: (
        s.num_waiting
    ),
    _family("queue_oldest_seconds", "gauge", "Waiting time of the oldest request of the stage."): lambda s: (
        s.oldest_wait
    ),
    _family("grants_total", "counter", "Requests given to workers, each attempt counted."): lambda s: (
        s.counters.grants
    ),
    _family(
        "retries_total", "counter", "Requests that were repeated because their worker was lost."
    ): lambda s: s.counters.retries,
    _family("lost_workers_total", "counter", "Workers that have left, ended or become silent."): lambda s: (
        s.counters.lost_workers
    ),
    _family(
        "failed_requests_total", "counter", "Requests that failed because workers were lost."
    ): lambda s: s.counters.failed,
    _family(
        "kept_tensors_total", "counter", "Outputs that workers have kept for the next stage."
    ): lambda s: s.counters.kept_tensors,
    _family("kept_bytes_total", "counter", "Bytes of these outputs."): lambda s: s.counters.kept_bytes,
}


def _worker_family(name: str, help: str) -> Family:
    return Family(f"neso_stage_worker_{name}", "gauge", help, ("model", "version", "worker"))


STAGE_WORKER_FAMILIES: dict[Family, Callable[[StageWorker], float]] = {
    _worker_family("requests", "Requests that the worker of the stage has."): lambda w: len(w.jobs),
    _worker_family("used_slots", "Batch entries of these requests."): lambda w: w.num_used,
    _worker_family("slots", "Batch entries that it executes at a time."): lambda w: w.slots,
}


class StageMetrics:
    """Values of a stage and of its workers, read at each scrape."""

    def __init__(self, model: ModelMetrics, stage: Stage) -> None:
        self._model, self._stage = model, stage
        self._unwatch = [model.watch(family, partial(read, stage)) for family, read in STAGE_FAMILIES.items()]
        self._unwatch_worker: dict[StageWorker, list[Callable[[], None]]] = {}

    def update(self) -> None:
        """Add the values of workers that have joined, and remove those of others."""
        current = set(self._stage.workers.values())
        for worker in [*self._unwatch_worker]:
            if worker not in current:
                self._remove(worker)
        for worker in current - self._unwatch_worker.keys():
            self._unwatch_worker[worker] = [
                self._model.watch(family, partial(read, worker), worker.name)
                for family, read in STAGE_WORKER_FAMILIES.items()
            ]

    def _remove(self, worker: StageWorker) -> None:
        for unwatch in self._unwatch_worker.pop(worker):
            unwatch()

    def close(self) -> None:
        """Remove the values of an unloaded model."""
        for unwatch in self._unwatch:
            unwatch()
        for worker in [*self._unwatch_worker]:
            self._remove(worker)
