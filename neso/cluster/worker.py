"""A worker: an engine, and an agent that pulls requests for it from the queue of one or more front ends."""

from __future__ import annotations

import asyncio
import logging
import os
import socket as sockets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec.structs import replace

from neso.cluster.agent import leaving, run_together
from neso.cluster.jetstream.connection import NatsOptions
from neso.cluster.jetstream.worker import NatsServers
from neso.cluster.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Cost,
    Credits,
    EngineEvent,
    Frame,
    FromWorker,
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
from neso.cluster.worker_options import WorkerOptions, checkpoint_digest
from neso.engine.cluster_config import Roles
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
    LoadLora,
    LoraDone,
    LoraNames,
    StepOutputs,
    UnloadLora,
)
from neso.generation.output import FinishReason

logger = logging.getLogger(__name__)

PREFILL_STEPS = 2
"""A worker takes prompts for this many steps in advance, so that its engine never waits for the queue."""

_request_decoder = msgspec.msgpack.Decoder(EngineRequest)


class FrontEnds(Protocol):
    """Connection to the front ends. `greeted`: names of those that are known from the start."""

    greeted: tuple[str, ...]

    async def receive(self) -> tuple[str, bytes | None]:
        """Return the name of a front end and its encoded message; None: messages were lost."""

    def send(self, front_end: str, message: FromWorker) -> bool:
        """Send a message. Returns False if the front end has gone."""

    def refused(self, front_end: str, reason: str) -> None:
        """A front end does not accept this worker. May raise `EngineError` to end it."""

    async def run(self, worker: Worker) -> None:
        """Do what is to be done beside messages, until cancelled."""

    async def close(self) -> None:
        """Close after sending what is pending."""


class OneFrontEnd:
    """A front end at an address: its name is ""."""

    greeted: tuple[str, ...] = ("",)

    def __init__(self, name: str, address: str, token: str | None) -> None:
        self._socket, self._address = WorkerSocket(name, address, token), address

    async def receive(self) -> tuple[str, bytes | None]:
        return "", await self._socket.receive()

    def send(self, front_end: str, message: FromWorker) -> bool:
        self._socket.send(message)
        return True

    def refused(self, front_end: str, reason: str) -> None:
        raise EngineError(f"the front end at {self._address} refuses this worker: {reason}")

    async def run(self, worker: Worker) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self._socket.close()


@dataclass(slots=True)
class _FrontEnd:
    """A front end that knows this worker. `num_grants`: that it has sent; `welcome`: None until it has accepted;
    `block_changes`: for the next report.
    """

    num_grants: int = 0
    welcome: Welcome | None = None
    silent_checks: int = 0
    block_changes: list[BlockChanges] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    """A request in the engine.

    `sent`: number of tokens of each sequence that were sent to the front end; `hidden`: beams that output nothing.
    """

    front_end: str
    request_id: str
    attempt: int
    cost: Cost
    ticket: str
    sent: list[int]
    hidden: int
    open: set[int] = field(default_factory=set)
    started: bool = False


class Worker:
    """Pulls requests by credits and passes their outputs to the front ends. Bound to the running event loop."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._channel: EngineChannel
        self._info: EngineInfo
        self._servers: FrontEnds
        self.digest = ""
        self._front_ends: dict[str, _FrontEnd] = {}
        self._running: dict[str, _Running] = {}
        self._last_grants: deque[str] = deque(maxlen=1024)
        self._changes: dict[int, tuple[str, int]] = {}  # changes of adapters: front end, and its number
        self._num_changes = 0
        self._stats = EngineStats()
        self._loras: dict[str, str | None] = {}
        self._draining = False
        self._stopped = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []

    def stop(self) -> None:
        """Take no more requests, finish those that run within `drain_seconds`, and end `run`."""
        self._draining = True
        self._stopped.set()

    async def run(self) -> None:
        """Load the model and serve until `stop`. Raises `EngineError` if the engine fails or the worker is refused."""
        options = self._options
        self.digest = await asyncio.to_thread(checkpoint_digest, options.config)
        if isinstance(options.address, NatsOptions):
            self._servers = await NatsServers.open(options.address, options.name, self.digest)
        else:
            self._servers = OneFrontEnd(options.name, options.address, options.token)
        try:
            await self._load()
        except EngineError as error:
            for name in self._servers.greeted:
                self._servers.send(name, Leave(f"the model could not be loaded: {error}"))
            await self._servers.close()
            raise
        for name in self._servers.greeted:
            self._hello(name)
        try:
            with leaving(self._tell_all):
                await run_together(
                    *(self._until_dead(), self._from_engine(), self._from_front_ends(), self._beat()),
                    *(self._until_stopped(), self._servers.run(self)),
                )
        finally:
            await self._servers.close()
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

    def _hello(self, name: str) -> None:
        """Introduce the worker to a front end, which gets nothing of earlier requests."""
        options = self._options
        self._front_ends[name] = _FrontEnd()
        self._servers.send(
            name,
            Hello(
                version=PROTOCOL_VERSION,
                name=options.name,
                host=sockets.gethostname(),
                pid=os.getpid(),
                model=self.digest,
                info=self._info,
                roles=options.roles,
                loras=self._loras,
            ),
        )

    async def _until_dead(self) -> None:
        raise EngineError(await asyncio.shield(self._channel.dead))

    async def _until_stopped(self) -> None:
        await self._stopped.wait()
        self._report()
        finished = self.wait_until(lambda: not self._running)
        await asyncio.wait((asyncio.ensure_future(finished),), timeout=self._options.drain_seconds)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition about the requests of this worker."""
        while not condition():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def changed(self) -> None:
        """Check the conditions of `wait_until` again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- credits ------------------------------------------------------------------------------------------------

    @property
    def roles(self) -> Roles:
        return self._options.roles

    @property
    def num_requests(self) -> int:
        """Number of requests in the engine."""
        return len(self._running)

    def tickets(self) -> list[str]:
        """Return the tickets of the requests in the engine."""
        return [running.ticket for running in self._running.values() if running.ticket]

    def has_room(self, num_claims: int = 0) -> bool:
        """Whether a request can start now, beside those that are being claimed."""
        credits = self.credits()
        if self._draining:
            return False
        blocks = credits.blocks > 0 or not self._stats.num_blocks
        room = credits.sequences > num_claims and credits.prefill_tokens > 0 and blocks
        return (credits.idle and not num_claims) or room

    def credits_for(self, front_end: str) -> Credits:
        """Return what the worker can take now, for a front end whose grants so far are included."""
        known = self._front_ends.get(front_end)
        return self.credits(known.num_grants if known is not None else 0)

    async def wait_for_grant(self, front_end: str, request_id: str, attempt: int, timeout: float) -> None:
        """Wait until an announced request has come, at most `timeout` seconds."""
        engine_id = _engine_id(front_end, request_id, attempt)
        come = asyncio.ensure_future(self.wait_until(lambda: engine_id in self._last_grants))
        await asyncio.wait((come,), timeout=timeout)
        come.cancel()

    def credits(self, num_grants: int = 0) -> Credits:
        """Return what the worker can take now. `num_grants`: that a front end has sent."""
        if self._draining:
            return Credits(grants=num_grants)
        running = self._running.values()
        info = self._info
        prefilling = [one.cost for one in running if not one.started]
        free_blocks = self._stats.num_blocks - self._stats.num_used_blocks
        return Credits(
            sequences=info.max_num_seqs - sum(len(one.open) + one.hidden for one in running),
            blocks=free_blocks - sum(cost.blocks for cost in prefilling),
            prefill_tokens=PREFILL_STEPS * info.max_num_batched_tokens
            - sum(cost.prefill_tokens for cost in prefilling),
            grants=num_grants,
            idle=not self._running,
        )

    def _report(
        self, frames: dict[str, list[Frame]] | None = None, *, to: Iterable[str] | None = None
    ) -> None:
        """Send credits and outputs to front ends. `to`: their names; None for all."""
        for name in tuple(self._front_ends) if to is None else to:
            front_end = self._front_ends.get(name)
            if front_end is None or front_end.welcome is None:
                continue
            own = frames.get(name, []) if frames is not None else []
            changes, front_end.block_changes = front_end.block_changes, []
            credits = self.credits(front_end.num_grants)
            report = Report(credits, self._stats, own, changes, time.monotonic_ns())
            if not self._servers.send(name, report):
                logger.warning("the front end '%s' has gone", name)
                self._forget(name)

    async def _beat(self) -> None:
        """Send a report regularly, and give a front end up when it is silent."""
        while True:
            silences = [one.welcome.silence for one in self._front_ends.values() if one.welcome is not None]
            shortest = min((silence for silence in silences if silence), default=0.0)
            await asyncio.sleep(min(1.0, shortest / 8) if shortest else 1.0)
            self._report()
            for name, front_end in tuple(self._front_ends.items()):
                front_end.silent_checks += 1
                silence = front_end.welcome.silence if front_end.welcome is not None else 0.0
                if silence and front_end.silent_checks > 2 * max(8, silence):
                    logger.warning("the front end has not responded for %g s", 2 * silence)
                    self._forget(name)
                    if name in self._servers.greeted:
                        self._hello(name)

    # -- from the engine ----------------------------------------------------------------------------------------

    async def _from_engine(self) -> None:
        while True:
            self._handle(await self._channel.receive())

    def _handle(self, event: Event) -> None:
        match event:
            case StepOutputs(outputs, stats):
                self._stats = stats
                busy = {running.front_end for running in self._running.values()}
                self._report(self._frames(outputs), to=busy)
                self.changed()
            case BlockChanges():
                for front_end in self._front_ends.values():
                    if front_end.welcome is not None:
                        front_end.block_changes.append(event)
            case LoraNames(names):
                self._loras = names
                self._tell_all(EngineEvent(event))
            case LoraDone(number):
                name, own = self._changes.pop(number, ("", number))
                if name in self._front_ends:
                    self._servers.send(name, EngineEvent(replace(event, number=own)))
            case Integrity():
                self._tell_all(EngineEvent(event))
            case _:
                logger.error("the engine has sent an unexpected event: %s", type(event).__name__)

    def _tell_all(self, message: EngineEvent | Leave) -> None:
        for name in tuple(self._front_ends):
            self._servers.send(name, message)

    def _frames(self, outputs: list[SequenceOutput]) -> dict[str, list[Frame]]:
        """Return the outputs of a step by front end."""
        frames: dict[str, list[Frame]] = {}
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            running.started = True
            own = replace(output, request_id=running.request_id)
            frame = Frame(running.attempt, running.sent[output.index], own)
            frames.setdefault(running.front_end, []).append(frame)
            running.sent[output.index] += len(output.token_ids)
            if output.finish_reason is not None:
                running.open.discard(output.index)
            if not running.open or output.finish_reason is FinishReason.ERROR:
                del self._running[output.request_id]
                logger.debug(
                    "request %s, attempt %d has ended: %s",
                    *(running.request_id, running.attempt, output.error or output.finish_reason),
                )
        return frames

    # -- from the front ends ------------------------------------------------------------------------------------

    async def _from_front_ends(self) -> None:
        while True:
            name, data = await self._servers.receive()
            front_end = self._front_ends.get(name)
            if front_end is not None:
                front_end.silent_checks = 0
            if data is None:
                logger.warning("messages of the front end '%s' were lost", name)
                self._forget(name)
                self._hello(name)
            else:
                self._obey(name, to_worker.decode(data))

    def _obey(self, name: str, message: ToWorker) -> None:
        match message:
            case Introduce():
                self._forget(name)
                self._hello(name)
                return
            case Goodbye():
                self._forget(name)
                for known in self._servers.greeted:
                    self._front_ends[known] = _FrontEnd()
                return
            case Refused(reason):
                self._forget(name)
                self._servers.refused(name, reason)
                return
        front_end = self._front_ends.get(name)
        if front_end is None:
            self._hello(name)
            return
        match message:
            case Welcome():
                if front_end.welcome is not None:
                    # The front end had taken this worker for lost, and repeats its requests.
                    self._forget(name)
                    front_end = self._front_ends[name] = _FrontEnd()
                front_end.welcome = message
                self._report(to=[name])
            case Grant():
                self._start(name, front_end, message)
            case Cancel(request_id, attempt, index):
                self._cancel(_engine_id(name, request_id, attempt), index)
            case Tell(command):
                if isinstance(command, LoadLora | UnloadLora):
                    self._num_changes += 1
                    self._changes[self._num_changes] = name, command.number
                    command = replace(command, number=self._num_changes)
                self._channel.send(command)
            case Ping():
                pass

    def _start(self, name: str, front_end: _FrontEnd, grant: Grant) -> None:
        front_end.num_grants += 1
        try:
            request = _request_decoder.decode(grant.request)
        except msgspec.MsgspecError as error:
            failed = SequenceOutput.failed(
                grant.request_id, 0, f"the worker cannot read the request: {error}"
            )
            self._report({name: [Frame(grant.attempt, 0, failed)]}, to=[name])
            return
        engine_id = _engine_id(name, grant.request_id, grant.attempt)
        count = 1 if request.pooling is not None else request.sampling.num_outputs
        self._running[engine_id] = _Running(
            front_end=name,
            request_id=grant.request_id,
            attempt=grant.attempt,
            cost=grant.cost,
            ticket=grant.ticket,
            sent=[len(request.output_token_ids)] * count,
            hidden=0 if request.pooling is not None else request.sampling.num_sequences - count,
            open=set(range(count)),
        )
        logger.debug(
            "request %s, attempt %d%s: begins with %d known tokens",
            *(grant.request_id, grant.attempt, f" (trace {request.trace})" if request.trace else ""),
            len(request.prompt_token_ids) + len(request.output_token_ids),
        )
        self._last_grants.append(engine_id)
        self._channel.send(Add(replace(request, request_id=engine_id)))
        self.changed()

    def _cancel(self, engine_id: str, index: int | None) -> None:
        running = self._running.get(engine_id)
        if running is None:
            return
        self._channel.send(Abort(engine_id, index))
        logger.debug("request %s, attempt %d is cancelled", running.request_id, running.attempt)
        if index is not None:
            running.open.discard(index)
        if index is None or not running.open:
            del self._running[engine_id]
        self.changed()

    def _forget(self, name: str) -> None:
        """Abort all requests of a front end."""
        self._front_ends.pop(name, None)
        for engine_id, running in tuple(self._running.items()):
            if running.front_end == name:
                self._cancel(engine_id, None)


def _engine_id(front_end: str, request_id: str, attempt: int) -> str:
    """Return the id of an attempt in the engine: two attempts of a request can be in one engine for a moment."""
    return f"{front_end}/{request_id}:{attempt}"
