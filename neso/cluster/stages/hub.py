"""The workers of all stages of a server: where they connect, and which stage each belongs to."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neso.cluster.connections import Connections, WorkerFailed
from neso.cluster.sockets import FrontEndSocket, listen_for_workers, read_token
from neso.cluster.stages.manifold import Manifold
from neso.cluster.stages.messages import (
    PROTOCOL_VERSION,
    StageHello,
    StageReport,
    from_worker,
)
from neso.cluster.stages.stage import Stage, StageWorker
from neso.engine.errors import EngineError
from neso.server.errors import Unavailable
from neso.server.metrics.registry import MetricsRegistry
from neso.server.stage_options import StageOptions

logger = logging.getLogger(__name__)


class StageConnections(Connections[StageHello, StageWorker]):
    """Connects each worker with the stage of its model. `stages`: by model and version."""

    def __init__(self, silence: float, sockets: Sequence[FrontEndSocket], metrics: MetricsRegistry) -> None:
        self._metrics = metrics
        self.stages: dict[tuple[str, str], OpenStage] = {}
        self._stage_of: dict[StageWorker, OpenStage] = {}
        super().__init__(StageHello, from_worker, silence, sockets)

    def _accept(self, name: str, hello: StageHello) -> StageWorker:
        if hello.version != PROTOCOL_VERSION:
            raise WorkerFailed(
                f"it has version {hello.version} of the protocol, this server {PROTOCOL_VERSION}"
            )
        stage = self.stages.get((hello.model, hello.model_version))
        if stage is None:
            raise WorkerFailed(
                f"this server has no stage of version {hello.model_version} of model '{hello.model}'"
            )
        if hello.signature != stage.signature:
            raise WorkerFailed(f"its model '{hello.model}' has other inputs, outputs or batching options")
        worker = StageWorker(name, hello.host_id, max(1, hello.slots), hello.engine)
        self._stage_of[worker] = stage
        return worker

    def _joined(self, worker: StageWorker, hello: StageHello) -> None:
        open_stage = self._stage_of[worker]
        if not open_stage.first.done():
            open_stage.first.set_result(hello)
        open_stage.stage.add(worker)

    def _received(self, worker: StageWorker, message: Any) -> None:
        assert isinstance(message, StageReport)
        self._metrics.add(message.counts)
        self._stage_of[worker].stage.report(worker, message)

    def _lost(self, worker: StageWorker, reason: str) -> None:
        self._stage_of.pop(worker).stage.lose(worker, reason)

    def close_stage(self, opened: OpenStage) -> None:
        """Fail the requests of a stage, and let its workers introduce themselves to its successor, if there is one."""
        key = opened.stage.model, opened.stage.version
        if self.stages.get(key) is opened:
            del self.stages[key]
        opened.stage.close(Unavailable(f"model '{opened.stage.model}' is unloaded"))
        for worker in tuple(opened.stage.workers.values()):
            self.lost(worker.name, "its stage has ended")


class OpenStage:
    """A stage with the signature that its workers must have. `first`: first message of its first worker."""

    def __init__(self, stage: Stage, signature: str) -> None:
        self.stage, self.signature = stage, signature
        self.first: asyncio.Future[StageHello] = asyncio.get_running_loop().create_future()


class StageHub:
    """Where the workers of all stages connect. Bound to the running event loop. Raises `EngineError`.

    `metrics`: gets what the workers count.
    """

    def __init__(self, options: StageOptions, metrics: MetricsRegistry) -> None:
        self.options = options
        token = read_token(options.token_file)
        self._directory = Path(tempfile.mkdtemp(prefix="neso-stages-"))
        try:
            sockets, addresses = listen_for_workers(self._directory, options.address, token)
        except EngineError:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        self.local_address = addresses[0]
        for address in addresses[1:]:
            logger.info("workers of stages can join at %s", address)
        self.connections = StageConnections(options.heartbeat_timeout, sockets, metrics)
        self.manifold = Manifold(self.connections.knows, self.connections.send)
        self._num_workers: Counter[str] = Counter()

    def next_name(self, model: str) -> str:
        """Return a name for a worker of a model."""
        self._num_workers[model] += 1
        return f"{model}-{self._num_workers[model]}"

    def open_stage(self, model: str, version: str, config: Any) -> OpenStage:
        """Create the stage of a model version. It replaces an earlier one, which continues with its own workers."""
        send, attempts = self.connections.send, self.options.max_attempts
        stage = Stage(model, version, config.dynamic_batching, attempts, self.manifold, send)
        opened = OpenStage(stage, signature_digest(config))
        self.connections.stages[model, version] = opened
        return opened

    async def close(self) -> None:
        """Close the connections."""
        await self.connections.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def signature_digest(config: Any) -> str:
    """Return what two configurations of a model must have in common to be executed by the same stage."""
    from neso.server.signature import Signature

    signature = Signature(config)
    parts = [signature.inputs, signature.outputs, signature.max_batch_size]
    return repr((*parts, config.model_transaction_policy.decoupled))
