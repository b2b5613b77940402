"""A worker: an engine, and an agent that pulls requests for it from the queue of a front end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket as sockets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from neso.cluster.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Cost,
    Credits,
    EngineEvent,
    Frame,
    Goodbye,
    Grant,
    Hello,
    Introduce,
    Leave,
    Ping,
    Refused,
    Report,
    Tell,
    ToWorker,
    Welcome,
    to_worker,
)
from neso.cluster.sockets import WorkerSocket
from neso.engine.cluster_config import MIXED, ClusterConfig, Roles
from neso.engine.config import EngineConfig
from neso.engine.core.prefix_keys import BlockChanges
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.stats import EngineStats
from neso.engine.errors import EngineError
from neso.engine.ipc.channel import EngineChannel, open_channel
from neso.engine.ipc.messages import (
    Abort,
    Add,
    EngineInfo,
    Event,
    Integrity,
    LoadFailed,
    LoraDone,
    LoraNames,
    StepOutputs,
)
from neso.engine.kv_transfer.format import model_digest
from neso.generation.output import FinishReason

logger = logging.getLogger(__name__)

PREFILL_STEPS = 2
"""A worker takes prompts for this many steps in advance, so that its engine never waits for the queue."""
_RESULT_OPTIONS = ("dtype", "quantization", "max_attention_window_size", "sink_token_length")

_request_decoder = msgspec.msgpack.Decoder(EngineRequest)


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`address`: of the front end; `name`: unique among its workers; `drain_seconds`: to finish requests at the end."""

    config: EngineConfig
    address: str
    name: str
    roles: Roles = MIXED
    token: str | None = None
    drain_seconds: float = 30.0


def worker_config(config: EngineConfig, *, transfers: bool) -> EngineConfig:
    """Return the options of a worker's engine. `transfers`: whether workers take prompts from each other.

    The server has the queue and its limit.
    """
    transfer = replace(config.transfer, kv_transfer=True) if transfers else config.transfer
    scheduler = replace(config.scheduler, max_queue_size=None)
    return replace(config, cluster=ClusterConfig(), scheduler=scheduler, transfer=transfer)


def checkpoint_digest(config: EngineConfig) -> str:
    """Return a digest of the checkpoint and of the options that change results."""
    return model_digest(Path(config.model), *(getattr(config, name) for name in _RESULT_OPTIONS))


@dataclass(slots=True)
class _Running:
    """A request in the engine. `sent`: number of tokens of each sequence that were sent to the front end."""

    request_id: str
    attempt: int
    cost: Cost
    sent: list[int]
    open: set[int] = field(default_factory=set)
    started: bool = False


class Worker:
    """Pulls requests by credits and passes their outputs to the front end. Bound to the running event loop."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._channel: EngineChannel
        self._info: EngineInfo
        self._socket = WorkerSocket(options.name, options.address, options.token)
        self._running: dict[str, _Running] = {}
        self._stats = EngineStats()
        self._loras: dict[str, str | None] = {}
        self._block_changes: list[BlockChanges] = []  # for the next report
        self._num_grants = 0
        self._welcome: Welcome | None = None
        self._silent_checks = 0
        self._draining = False
        self._stopped = asyncio.Event()
        self._changed = asyncio.Event()  # set after each step

    def stop(self) -> None:
        """Take no more requests, finish those that run within `drain_seconds`, and end `run`."""
        self._draining = True
        self._stopped.set()

    async def run(self) -> None:
        """Load the model and serve until `stop`. Raises `EngineError` if the engine fails or the worker is refused."""
        try:
            await self._load()
        except EngineError as error:
            self._socket.send(Leave(f"the model could not be loaded: {error}"))
            self._socket.close()
            raise
        self._hello()
        work = [self._from_engine(), self._from_front_end(), self._beat(), self._until_stopped()]
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(coroutine) for coroutine in work]
        reason = "it was stopped"
        try:
            dead = self._channel.dead
            await asyncio.wait((*tasks, dead), return_when=asyncio.FIRST_COMPLETED)
            if dead.done():
                raise EngineError(dead.result())
            next(task for task in tasks if task.done()).result()
        except EngineError as error:
            reason = str(error)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._socket.send(Leave(reason))
            self._socket.close()
            await self._channel.close(timeout=5.0)

    async def _load(self) -> None:
        self._channel = open_channel(self._options.config, in_process=False)
        try:
            first = await self._channel.receive_first()
        except BaseException:
            await self._channel.close(timeout=0)
            raise
        if isinstance(first, LoadFailed):
            await self._channel.close(timeout=5.0)
            raise EngineError(first.message)
        assert isinstance(first, EngineInfo)
        self._info = first
        self._stats = EngineStats(num_blocks=first.num_blocks)
        self._loras = dict(first.lora.lora_modules)

    def _hello(self) -> None:
        options = self._options
        self._num_grants, self._welcome = 0, None
        self._socket.send(
            Hello(
                version=PROTOCOL_VERSION,
                name=options.name,
                host=sockets.gethostname(),
                pid=os.getpid(),
                model=checkpoint_digest(options.config),
                info=self._info,
                roles=options.roles,
                loras=self._loras,
            )
        )

    async def _until_stopped(self) -> None:
        await self._stopped.wait()
        end = asyncio.get_running_loop().time() + self._options.drain_seconds
        self._report([])
        while self._running and (left := end - asyncio.get_running_loop().time()) > 0:
            self._changed.clear()
            await asyncio.wait((asyncio.ensure_future(self._changed.wait()),), timeout=left)

    # -- credits ------------------------------------------------------------------------------------------------

    def credits(self) -> Credits:
        """Return what the worker can take now."""
        if self._draining:
            return Credits(grants=self._num_grants)
        running = self._running.values()
        info, scheduler = self._info, self._options.config.scheduler
        prefilling = [one.cost for one in running if not one.started]
        free_blocks = self._stats.num_blocks - self._stats.num_used_blocks
        return Credits(
            sequences=info.max_num_seqs - sum(len(one.open) for one in running),
            blocks=free_blocks - sum(cost.blocks for cost in prefilling),
            prefill_tokens=PREFILL_STEPS * scheduler.max_num_batched_tokens
            - sum(cost.prefill_tokens for cost in prefilling),
            grants=self._num_grants,
            idle=not self._running,
        )

    def _report(self, frames: list[Frame]) -> None:
        changes, self._block_changes = self._block_changes, []
        if self._welcome is not None:
            self._socket.send(Report(self.credits(), self._stats, frames, changes))

    async def _beat(self) -> None:
        """Send a report regularly, and give the front end up when it is silent."""
        while True:
            silence = self._welcome.silence if self._welcome is not None else 0.0
            await asyncio.sleep(min(1.0, silence / 8) if silence else 1.0)
            self._report([])
            self._silent_checks += 1
            if silence and self._silent_checks > 2 * max(8, silence):
                logger.warning("the front end has not responded for %g s", 2 * silence)
                self._abort_all()
                self._hello()
                self._silent_checks = 0

    # -- from the engine ----------------------------------------------------------------------------------------

    async def _from_engine(self) -> None:
        while True:
            self._handle(await self._channel.receive())

    def _handle(self, event: Event) -> None:
        match event:
            case StepOutputs(outputs, stats):
                self._stats = stats
                self._report(list(self._frames(outputs)))
                self._changed.set()
            case BlockChanges():
                self._block_changes.append(event)
            case LoraNames(names):
                self._loras = names
                self._socket.send(EngineEvent(event))
            case LoraDone() | Integrity():
                self._socket.send(EngineEvent(event))
            case _:
                logger.error("the engine has sent an unexpected event: %s", type(event).__name__)

    def _frames(self, outputs: list[SequenceOutput]) -> Iterator[Frame]:
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            running.started = True
            own = replace(output, request_id=running.request_id)
            yield Frame(running.attempt, running.sent[output.index], own)
            running.sent[output.index] += len(output.token_ids)
            if output.finish_reason is not None:
                running.open.discard(output.index)
            if not running.open or output.finish_reason is FinishReason.ERROR:
                del self._running[output.request_id]

    # -- from the front end -------------------------------------------------------------------------------------

    async def _from_front_end(self) -> None:
        while True:
            data = await self._socket.receive()
            self._silent_checks = 0
            self._obey(to_worker.decode(data))

    def _obey(self, message: ToWorker) -> None:
        match message:
            case Welcome():
                self._welcome = message
                self._report([])
            case Grant():
                self._start(message)
            case Cancel(request_id, attempt, index):
                self._cancel(_engine_id(request_id, attempt), index)
            case Tell(command):
                self._channel.send(command)
            case Introduce():
                self._abort_all()
                self._hello()
            case Goodbye():
                self._abort_all()
                self._welcome = None
            case Refused(reason):
                raise EngineError(f"the front end at {self._options.address} refuses this worker: {reason}")
            case Ping():
                pass

    def _start(self, grant: Grant) -> None:
        self._num_grants += 1
        try:
            request = _request_decoder.decode(grant.request)
        except msgspec.MsgspecError as error:
            failed = SequenceOutput.failed(
                grant.request_id, 0, f"the worker cannot read the request: {error}"
            )
            self._report([Frame(grant.attempt, 0, failed)])
            return
        engine_id = _engine_id(grant.request_id, grant.attempt)
        count = 1 if request.pooling is not None else request.sampling.num_sequences
        self._running[engine_id] = _Running(
            request_id=grant.request_id,
            attempt=grant.attempt,
            cost=grant.cost,
            sent=[len(request.output_token_ids)] * count,
            open=set(range(count)),
        )
        self._channel.send(Add(replace(request, request_id=engine_id)))

    def _cancel(self, engine_id: str, index: int | None) -> None:
        running = self._running.get(engine_id)
        if running is None:
            return
        self._channel.send(Abort(engine_id, index))
        if index is not None:
            running.open.discard(index)
        if index is None or not running.open:
            del self._running[engine_id]

    def _abort_all(self) -> None:
        for engine_id in tuple(self._running):
            self._cancel(engine_id, None)


def _engine_id(request_id: str, attempt: int) -> str:
    """Return the id of an attempt in the engine: two attempts of a request can be in one engine for a moment."""
    return f"{request_id}:{attempt}"
