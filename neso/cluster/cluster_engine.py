"""The engine of a model on workers: starts and restarts the workers of this host, and accepts those of others."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from neso.cluster.front_end import ClusterChannel
from neso.cluster.jetstream.connection import NatsConnection, NatsOptions
from neso.cluster.jetstream.front_end import NatsFrontEndSocket
from neso.cluster.jetstream.ticket_pulls import TicketPulls
from neso.cluster.local_worker import LocalWorker
from neso.cluster.messages import Hello
from neso.cluster.sockets import listen_for_workers, read_token
from neso.cluster.work_queue import WorkerState
from neso.cluster.worker_options import WorkerOptions, checkpoint_digest, default_name, worker_config
from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.engine_client import load_engine_tokenizer
from neso.engine.client.engine_group import sum_info
from neso.engine.client.output_processor import RequestState
from neso.engine.cluster_config import MIXED, Roles, is_nats
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.ipc.messages import EngineInfo
from neso.engine.placement import place_engines
from neso.engine.text.tokenizer import EngineTokenizer
from neso.engine.text.tokenizer_files import TokenizerError
from neso.engine.vision.image_prompt import ImagePrompt, open_image_prompt
from neso.generation.spans import Span

logger = logging.getLogger(__name__)

EngineWorker = LocalWorker[Hello, WorkerState]


class LocalWorkers:
    """The worker processes that the server has started, for an `EngineSupervisor`."""

    def __init__(self, workers: Sequence[EngineWorker]) -> None:
        self.engines = tuple(workers)

    def on_dead(self, callback: Callable[[int, str], None]) -> None:
        """Call `callback(number, reason)` when a worker ends unexpectedly."""
        for number, worker in enumerate(self.engines):
            worker.on_dead(partial(callback, number))

    async def restart(self, number: int) -> EngineInfo:
        """Start a worker again. Raises `EngineError`."""
        return (await self.engines[number].start()).info


class ClusterEngine(AsyncEngine):
    """An engine that consists of workers. Created by `open`.

    Requests wait while no worker is connected. `alive` is then false, so the model is not ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        channel: ClusterChannel,
        info: EngineInfo,
        tokenizer: EngineTokenizer,
        images: ImagePrompt | None,
        local: LocalWorkers,
        directory: Path,
    ) -> None:
        super().__init__(config, channel, info, tokenizer, images)
        self.cluster, self.local = channel, local
        self._directory = directory
        channel.connections.on_change(self._on_workers)
        channel.on_span = self._add_span

    @classmethod
    async def open(cls, config: EngineConfig, gpus: Sequence[str] = ()) -> ClusterEngine:
        """Start the local workers, or wait for another one to join. Raises `EngineError`."""
        _check(config)
        directory = Path(tempfile.mkdtemp(prefix="neso-workers-"))
        try:
            placed = _placed(config, gpus)
            digest = await asyncio.to_thread(checkpoint_digest, config)
            nats = _nats_options(config)
            open_channel = _listen(config, digest, directory) if nats is None else _join(config, digest, nats)
            channel, local_address = await open_channel
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        prefix = "" if nats is None else f"{default_name()}-"
        workers = [
            LocalWorker(
                "neso.cluster.worker_process",
                WorkerOptions(
                    config=one,
                    address=local_address,
                    name=f"{prefix}{_name(number, roles)}",
                    roles=roles,
                    verbose=logger.isEnabledFor(logging.DEBUG),
                ),
                channel.connections,
            )
            for number, (one, roles) in enumerate(zip(placed, config.cluster.local_roles, strict=True))
        ]
        try:
            info, tokenizer = await _load(config, channel, workers)
            images = open_image_prompt(config.model, info.vision, config.image_limits)
        except BaseException as error:
            await asyncio.gather(*(worker.stop(0) for worker in workers))
            await channel.close(timeout=0)
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, TokenizerError):
                raise EngineError(str(error)) from None
            raise
        return cls(config, channel, info, tokenizer, images, LocalWorkers(workers), directory)

    @property
    def alive(self) -> bool:
        return super().alive and bool(self.cluster.workers)

    def _on_workers(self) -> None:
        for worker in self.local.engines:
            worker.kill_if_lost()

    def _add_span(self, request_id: str, span: Span) -> None:
        state, _ = self._requests.get(request_id, (None, None))
        if isinstance(state, RequestState) and state.tracer is not None:
            state.tracer.add_span(span)

    async def stop(self, timeout: float = 5.0) -> None:
        await super().stop(timeout)
        await asyncio.gather(*(worker.stop(timeout) for worker in self.local.engines))
        shutil.rmtree(self._directory, ignore_errors=True)


async def _listen(config: EngineConfig, digest: str, directory: Path) -> tuple[ClusterChannel, str]:
    """Open a queue in this process. Returns also the address for workers of this host. Raises `EngineError`."""
    options = config.cluster
    token = read_token(options.worker_token_file)
    sockets, addresses = listen_for_workers(directory, options.worker_address, token)
    for address in addresses[1:]:
        logger.info("workers can join at %s", address)
    return ClusterChannel(config, digest, sockets), addresses[0]


def _nats_options(config: EngineConfig) -> NatsOptions | None:
    address = config.cluster.worker_address
    if address is None or not is_nats(address):
        return None
    return NatsOptions.of(config.cluster, address, config.model, config.cluster.worker_token_file)


async def _join(
    config: EngineConfig, digest: str, options: NatsOptions
) -> tuple[ClusterChannel, NatsOptions]:
    """Open a queue in NATS, which other servers share. Raises `EngineError`."""
    connection = await NatsConnection.open(options, "neso server")
    socket = NatsFrontEndSocket(connection, digest)
    pulls = TicketPulls(socket)
    channel = ClusterChannel(config, digest, [socket], pulls)
    try:
        await pulls.open()
        await socket.open()
    except BaseException:
        await channel.close(timeout=0)
        raise
    logger.info("server '%s' shares the queue '%s' at %s", socket.name, options.queue, options.shown)
    return channel, options


def _check(config: EngineConfig) -> None:
    """Raise `EngineError` for options that do not fit workers."""
    if config.data_parallel_size is not None:
        raise EngineError("data_parallel_size cannot be combined with workers: each worker has one engine")
    if config.rank_address is not None:
        raise EngineError("rank_address cannot be combined with workers")


def _placed(config: EngineConfig, gpus: Sequence[str]) -> list[EngineConfig]:
    """Return the options of each local worker. The front end has the queue and its limit."""
    transfers = any(roles != MIXED for roles in config.cluster.local_roles)
    own = worker_config(config, transfers=transfers)
    try:
        count = len(config.cluster.local_roles)
        return place_engines(own, count, gpus) if count else []
    except ValueError as error:
        raise EngineError(str(error)) from None


def _name(number: int, roles: Roles) -> str:
    return f"{'worker' if roles == MIXED else next(iter(roles))}-{number}"


async def _load(
    config: EngineConfig, channel: ClusterChannel, workers: Sequence[EngineWorker]
) -> tuple[EngineInfo, EngineTokenizer]:
    """Load the tokenizer while the workers load the model. Returns the properties of the model."""
    tokenizer = asyncio.ensure_future(asyncio.to_thread(load_engine_tokenizer, config))
    if not workers:
        logger.info("waiting for a worker")
        return await channel.connections.first_worker(), await tokenizer
    starts = [asyncio.ensure_future(worker.start()) for worker in workers]
    try:
        hellos = await asyncio.gather(*starts)
    finally:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
    return sum_info([hello.info for hello in hellos]), await tokenizer
