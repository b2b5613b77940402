"""Metrics of a stage: its queue and its workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from neso.backends.member_metrics import MemberMetrics
from neso.cluster.stages.stage import Stage, StageWorker
from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.engine_group import sum_info
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import EngineInfo
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


ENGINE_WORKER_FAMILIES: dict[Family, Callable[[StageWorker], float]] = {
    _worker_family("running_sequences", "Sequences that its engine executes."): lambda w: w.stats.num_running,
    _worker_family("waiting_sequences", "Sequences that wait in its engine."): lambda w: w.stats.num_waiting,
    _worker_family("kv_cache_usage", "Fraction of its KV cache in use."): lambda w: (
        w.stats.num_used_blocks / w.stats.num_blocks if w.stats.num_blocks else 0.0
    ),
}
"""Values of the workers of language models."""


def stage_metrics(model: ModelMetrics, stage: Stage) -> MemberMetrics[Stage, StageWorker]:
    """Return the metrics of a stage and of its workers."""
    return MemberMetrics(
        model,
        stage,
        STAGE_FAMILIES,
        lambda: [(worker, (worker.name,)) for worker in stage.workers.values()],
        lambda worker: STAGE_WORKER_FAMILIES | (ENGINE_WORKER_FAMILIES if worker.engine else {}),
    )


class StageEngines:
    """The engines of a stage's workers, for the metrics of a language model. `first`: those of the first worker."""

    engines: Sequence[AsyncEngine] = ()  # the values of each worker are among those of the stage

    def __init__(self, stage: Stage, first: EngineInfo) -> None:
        self._stage, self._info = stage, first

    @property
    def info(self) -> EngineInfo:
        infos = [worker.engine for worker in self._stage.workers.values() if worker.engine is not None]
        if infos:
            self._info = sum_info(infos)
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stage.stats

    @property
    def num_queued(self) -> int:
        return self._stage.num_waiting
