"""`StageBackend`: executes the requests of a model on worker processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from neso.backends.llm.metrics import LlmMetrics
from neso.backends.member_metrics import MemberMetrics
from neso.backends.restarts import Restarts, restart_counter
from neso.backends.stage_metrics import StageEngines, stage_metrics
from neso.cluster.local_worker import LocalWorker
from neso.cluster.stages.hub import OpenStage, StageHub
from neso.cluster.stages.messages import StageHello
from neso.cluster.stages.stage import Stage, StageWorker
from neso.cluster.stages.worker import StageWorkerOptions, worker_config
from neso.engine.errors import EngineError
from neso.engine.ipc.messages import EngineInfo
from neso.server.backend import Backend, ModelContext
from neso.server.errors import InvalidArgument, Unavailable, Unsupported
from neso.server.inference_response import ResponseStream

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
"""Failures of a worker process in `RESTART_WINDOW` seconds that are followed by a restart."""
RESTART_WINDOW = 300.0

Worker = LocalWorker[StageHello, StageWorker]


class StageBackend(Backend):
    """Passes requests to the workers of a stage. `wrapped`: the backend that the workers run."""

    on_workers = True
    wrapped: ClassVar[type[Backend]]

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._workers: list[Worker] = []
        self._restarting: set[asyncio.Task[None]] = set()
        self._hub: StageHub
        self._opened: OpenStage
        self._metrics: MemberMetrics[Stage, StageWorker]
        self._engine_metrics: LlmMetrics | None = None
        self._labels: Mapping[str, Sequence[str]] = {}

    @classmethod
    def of(cls, wrapped: type[Backend]) -> type[StageBackend]:
        """Return the backend of models whose workers run the backend `wrapped`."""
        fields = wrapped.implemented_fields | {"dynamic_batching"}
        return type(cls.__name__, (cls,), {"wrapped": wrapped, "implemented_fields": fields})

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        """Complete the configuration as the backend of the workers does."""
        cls.wrapped.auto_complete(config, directory, version_directory, backend_config)

    async def load(self) -> None:
        """Start the workers, or wait for one that joins."""
        self._check()
        core, name = self.context.core, self.context.name
        try:
            if core.stages is None:
                core.stages = StageHub(core.options.stages, core.metrics)
            self._hub = core.stages
        except EngineError as error:
            raise Unavailable(str(error)) from None
        self._opened = self._hub.open_stage(name, self.context.version, self.context.config)
        self._metrics = stage_metrics(self.context.metrics, self._opened.stage)
        self._hub.connections.on_change(self._on_workers)
        count = self._hub.options.workers[name]
        self._workers += [self._make_worker((number, count)) for number in range(count)]
        try:
            if count:
                await asyncio.gather(*(worker.start() for worker in self._workers))
            else:
                logger.info("model '%s': waiting for a worker of its stage", name)
            hello = await asyncio.shield(self._opened.first)
        except EngineError as error:
            raise Unavailable(str(error)) from None
        if hello.engine is not None:
            self._use_engines(hello.engine, hello.max_queue_size)
        self._labels = hello.labels
        self.context.config.model_transaction_policy.decoupled = hello.decoupled

    def _use_engines(self, engine: EngineInfo, max_queue_size: int | None) -> None:
        """Show the metrics of the workers' engines, and apply the options of an engine's queue to that of the stage."""
        stage, context = self._opened.stage, self.context
        self._engine_metrics = LlmMetrics(context.metrics, StageEngines(stage, engine), counts_steps=False)
        if self._engine_metrics.adapters is not None:
            self._engine_metrics.adapters.close()  # which adapters run is not known here
        batching = type(context.config.dynamic_batching)()
        batching.CopyFrom(context.config.dynamic_batching)
        policy = batching.default_queue_policy
        policy.allow_timeout_override = True
        policy.max_queue_size = policy.max_queue_size or max_queue_size or 0
        stage.use_limits(batching)

    def _check(self) -> None:
        """Raise `Unsupported` for models that cannot run on workers."""
        name, config, wrapped = self.context.name, self.context.config, self.wrapped
        if config.HasField("sequence_batching"):
            raise Unsupported(
                f"--stage {name}: models with sequence_batching cannot run on workers, because the requests of a "
                "sequence belong to one instance"
            )
        if config.HasField("ensemble_scheduling"):
            raise Unsupported(f"--stage {name}: an ensemble runs in the server; name the models of its steps")
        if (
            wrapped.language_model is not Backend.language_model
            and wrapped.engine_group is Backend.engine_group
        ):
            raise Unsupported(f"--stage {name}: backend '{config.backend}' cannot run on workers")
        if self.context.namespace:
            raise Unsupported("--stage cannot be combined with --model-namespacing")

    def _make_worker(self, share: tuple[int, int]) -> Worker:
        core, context = self.context.core, self.context
        config = type(context.config)()
        config.CopyFrom(context.config)
        config.version_policy.specific.versions[:] = [int(context.version)]
        options = StageWorkerOptions(
            model=context.name,
            version=context.version,
            config=worker_config(config),
            repositories=[str(path) for path in core.options.model_repository],
            address=self._hub.local_address,
            token_file=self._hub.options.token_file,
            name=self._hub.next_name(context.name),
            backend_config=core.options.backend_config,
            backend_directory=None
            if core.options.backend_directory is None
            else str(core.options.backend_directory),
            disable_auto_complete_config=core.options.disable_auto_complete_config,
            share=share,
            verbose=logger.isEnabledFor(logging.DEBUG),
        )
        worker: Worker = LocalWorker("neso.cluster.stages.worker_process", options, self._hub.connections)
        restarts = Restarts(MAX_RESTARTS, restart_counter(context.metrics), RESTART_WINDOW)
        worker.on_dead(partial(self._on_dead, worker, restarts))
        return worker

    def _on_workers(self) -> None:
        self._metrics.update()
        if self._engine_metrics is not None:
            self._engine_metrics.replace_engine()
        for worker in self._workers:
            worker.kill_if_lost()

    def _on_dead(self, worker: Worker, restarts: Restarts, reason: str) -> None:
        logger.error("model '%s': %s", self.context.name, reason)
        restarts.record_failure()
        task = asyncio.get_running_loop().create_task(self._restart(worker, restarts))
        self._restarting.add(task)
        task.add_done_callback(self._restarting.discard)

    async def _restart(self, worker: Worker, restarts: Restarts) -> None:
        def failed(error: Exception) -> None:
            logger.error("model '%s': a worker could not be restarted: %s", self.context.name, error)

        if await restarts.restart(worker.start, failed) is None:
            logger.critical(
                "model '%s': worker '%s' has failed too often and is not restarted",
                *(self.context.name, worker.name),
            )

    def submit(self, request: ResponseStream) -> None:
        stage = self._opened.stage
        if not self.wrapped.stops(request.request):
            stage.submit(request)
        elif not request.request.id:
            raise InvalidArgument("stop: needs the id of the request to stop")
        else:
            stage.stop_requests(request)

    @property
    def output_labels(self) -> Mapping[str, Sequence[str]]:
        """Labels that the workers have."""
        return self._labels

    def ready(self) -> bool:
        """Whether a worker is connected."""
        return any(worker.accepts for worker in self._opened.stage.workers.values())

    async def unload(self) -> None:
        """End the workers."""
        for task in tuple(self._restarting):
            task.cancel()
        try:
            await asyncio.gather(*(worker.stop(10.0) for worker in self._workers))
        finally:
            if hasattr(self, "_opened"):
                self._hub.connections.close_stage(self._opened)
                self._hub.connections.ignore_changes(self._on_workers)
                self._metrics.close()
                if self._engine_metrics is not None:
                    self._engine_metrics.close()
