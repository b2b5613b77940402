"""The engine of a model on workers: starts and restarts the workers of this host, and accepts those of others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from neso.cluster.connections import WorkerConnections, WorkerFailed
from neso.cluster.front_end import ClusterChannel
from neso.cluster.sockets import FrontEndSocket, read_token
from neso.cluster.worker import WorkerOptions, checkpoint_digest, worker_config
from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.engine_client import load_engine_tokenizer
from neso.engine.client.engine_group import sum_info
from neso.engine.cluster_config import MIXED, Roles
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.ipc.channel import describe_exit
from neso.engine.ipc.messages import EngineInfo
from neso.engine.placement import place_engines
from neso.engine.text.tokenizer import EngineTokenizer
from neso.engine.text.tokenizer_files import TokenizerError
from neso.engine.vision.image_prompt import ImagePrompt, open_image_prompt

logger = logging.getLogger(__name__)


class LocalWorker:
    """A worker process of this host. `start` can be called again after it has ended."""

    def __init__(self, options: WorkerOptions, connections: WorkerConnections) -> None:
        self._options, self._connections = options, connections
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._on_dead: list[Callable[[str], None]] = []
        self._stopping = False

    @property
    def name(self) -> str:
        return self._options.name

    def on_dead(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` if the process ends unexpectedly after it has joined."""
        self._on_dead.append(callback)

    async def start(self) -> EngineInfo:
        """Start the process and wait until it has joined. Raises `EngineError`."""
        options = msgspec.json.encode(self._options).decode()
        command = (sys.executable, "-m", "neso.cluster.worker_process", options)
        process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE)
        self._process = process
        joining = asyncio.ensure_future(self._connections.joined(self.name))
        ended = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait((joining, ended), return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                # Its last message may still be in transit.
                await asyncio.wait((joining,), timeout=0.5)
            if not joining.done():
                raise EngineError(f"{self.name} has ended ({describe_exit(ended.result())})")
            info = joining.result()
        except BaseException as error:
            joining.cancel()
            self._kill()
            await ended
            if isinstance(error, WorkerFailed):
                raise EngineError(str(error)) from None
            raise
        self._watching = asyncio.create_task(self._watch(ended))
        return info

    async def _watch(self, ended: asyncio.Future[int]) -> None:
        reason = f"{self.name} has ended ({describe_exit(await ended)})"
        if self._stopping:
            return
        self._kill()
        self._connections.lost(self.name, reason)
        for callback in self._on_dead:
            callback(reason)

    def kill_if_lost(self) -> None:
        """Kill the process if the front end has given it up, for example because it hangs: it is then restarted."""
        if (
            self._watching is not None
            and not self._watching.done()
            and not self._connections.knows(self.name)
        ):
            self._kill()

    def _kill(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def stop(self, timeout: float) -> None:
        """End the process; kill it after `timeout` seconds."""
        self._stopping = True
        if self._process is None or self._process.returncode is not None:
            return
        if timeout:
            self._process.terminate()
        waiting = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait((waiting,), timeout=timeout)
        finally:
            self._kill()
            await waiting


class LocalWorkers:
    """The worker processes that the server has started, for an `EngineSupervisor`."""

    def __init__(self, workers: Sequence[LocalWorker]) -> None:
        self.engines = tuple(workers)

    def on_dead(self, callback: Callable[[int, str], None]) -> None:
        """Call `callback(number, reason)` when a worker ends unexpectedly."""
        for number, worker in enumerate(self.engines):
            worker.on_dead(partial(callback, number))

    async def restart(self, number: int) -> EngineInfo:
        """Start a worker again. Raises `EngineError`."""
        return await self.engines[number].start()


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

    @classmethod
    async def open(cls, config: EngineConfig, gpus: Sequence[str] = ()) -> ClusterEngine:
        """Start the local workers, or wait for another one to join. Raises `EngineError`."""
        options = config.cluster
        _check(config)
        token = read_token(options.worker_token_file)
        directory = Path(tempfile.mkdtemp(prefix="neso-workers-"))
        sockets = [FrontEndSocket()]
        try:
            local_address = sockets[0].listen(f"ipc://{directory}/front-end")
            if options.worker_address is not None:
                sockets.append(FrontEndSocket())
                address = sockets[1].listen(options.worker_address, token)
                logger.info("workers can join at %s", address)
            placed = _placed(config, gpus)
        except EngineError:
            for socket in sockets:
                socket.close()
            shutil.rmtree(directory, ignore_errors=True)
            raise
        channel = ClusterChannel(config, await asyncio.to_thread(checkpoint_digest, config), sockets)
        workers = [
            LocalWorker(
                WorkerOptions(config=one, address=local_address, name=_name(number, roles), roles=roles),
                channel.connections,
            )
            for number, (one, roles) in enumerate(zip(placed, config.cluster.local_roles, strict=True))
        ]
        try:
            info, tokenizer = await _load(config, channel, workers)
            images = open_image_prompt(config.model, info.vision, config.max_image_pixels)
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

    async def stop(self, timeout: float = 5.0) -> None:
        await super().stop(timeout)
        await asyncio.gather(*(worker.stop(timeout) for worker in self.local.engines))
        shutil.rmtree(self._directory, ignore_errors=True)


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
    config: EngineConfig, channel: ClusterChannel, workers: Sequence[LocalWorker]
) -> tuple[EngineInfo, EngineTokenizer]:
    """Load the tokenizer while the workers load the model. Returns the properties of the model."""
    tokenizer = asyncio.ensure_future(asyncio.to_thread(load_engine_tokenizer, config))
    if not workers:
        logger.info("waiting for a worker")
        return await channel.connections.first_worker(), await tokenizer
    starts = [asyncio.ensure_future(worker.start()) for worker in workers]
    try:
        infos = await asyncio.gather(*starts)
    finally:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
    return sum_info(infos), await tokenizer
