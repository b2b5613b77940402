"""The server's side of a queue in JetStream.

For each request that waits, the stream has a ticket, which only names the server. A worker with room pulls a ticket and
claims a request with it; the server then chooses the request. So tickets are shared between all workers and servers in
order of arrival, and each server keeps priorities, deadlines, prompts and tokens. The ticket is extended by the worker
and acknowledged by the server when the request has ended. If the worker is lost, the ticket is delivered again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from neso.cluster.jetstream.connection import ENTRY_SECONDS
from neso.cluster.jetstream.front_end import NatsFrontEndSocket
from neso.cluster.jetstream.messages import Claimed, Ticket, claim_decoder, encoder
from neso.cluster.messages import Introduce
from neso.cluster.pulls import PullEvents
from neso.cluster.work_queue import Job, WorkerState

if TYPE_CHECKING:
    from nats.aio.msg import Msg

logger = logging.getLogger(__name__)

_STREAM_FULL = 10077
_RETRY_SECONDS = 0.5
_NO_ROOM_SECONDS = 0.1
"""A ticket is delivered again after this time if its worker had no room for the request."""
_UNKNOWN_SECONDS = 1.0
"""The same, if the server does not know the worker yet."""
SILENT_SECONDS = 3.0
"""A worker that no longer extends its ticket has stopped if it also sends nothing for this long."""


@dataclass(slots=True)
class _Claim:
    """A worker that waits for a request. `ack`: where the ticket is acknowledged; `answer`: where the worker waits."""

    worker: WorkerState
    number: int
    ack: str
    answer: str


class TicketPulls:
    """Workers of a queue in JetStream get a request when they have claimed one.

    A worker whose cache has more of a prompt may get the request by the claim of another worker.
    """

    def __init__(self, socket: NatsFrontEndSocket) -> None:
        self._socket, self._nats = socket, socket.connection
        self._events: PullEvents
        self._claims: list[_Claim] = []
        self._held: dict[str, _Claim] = {}  # the ticket of each request that has a worker
        self._waiting: dict[str, Job] = {}
        self._running: dict[str, Job] = {}
        self._num_tickets = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self, events: PullEvents) -> None:
        self._events = events
        self._nats.on_reconnect.append(lambda: self._start(self._restore()))

    async def open(self) -> None:
        """Accept claims of workers."""
        subject = f"{self._nats.prefix}.claims.{self._socket.name}"
        await self._nats.client.subscribe(subject, cb=self._claim)
        self._start(self._check())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._socket.closed()

    # -- requests -----------------------------------------------------------------------------------------------

    def waits(self, job: Job) -> None:
        self._running.pop(job.id, None)
        self._waiting[job.id] = job
        held = self._held.pop(job.id, None)
        if held is not None:
            self._acknowledge(held.ack, b"-NAK")
        else:
            self._start(self._publish(job))

    def may_start(self, job: Job, worker: WorkerState) -> bool:
        claimers = [claim.worker for claim in self._claims]
        if worker in claimers or not claimers:
            return bool(claimers)
        cached = worker.uncached_tokens(job)
        return all(cached < claimer.uncached_tokens(job) for claimer in claimers)

    def granted(self, job: Job, worker: WorkerState) -> str:
        claim = next((claim for claim in self._claims if claim.worker is worker), self._claims[0])
        self._claims.remove(claim)
        del self._waiting[job.id]
        self._running[job.id], self._held[job.id] = job, claim
        self._answer(claim, Claimed(job.id, job.attempt) if claim.worker is worker else Claimed())
        return claim.ack

    def ended(self, job: Job) -> None:
        self._waiting.pop(job.id, None)
        self._running.pop(job.id, None)
        held = self._held.pop(job.id, None)
        if held is not None:
            self._acknowledge(held.ack, b"+ACK")

    def settle(self, *, soon: bool) -> None:
        if soon:
            return
        claims, self._claims = self._claims, []
        for claim in claims:
            self._answer(claim, Claimed())
            self._acknowledge(claim.ack, _nak(_NO_ROOM_SECONDS) if self._waiting else b"+ACK")

    # -- tickets ------------------------------------------------------------------------------------------------

    async def _publish(self, job: Job) -> None:
        """Put a ticket into the stream; tries again while NATS does not respond."""
        from nats.js.errors import APIError

        self._num_tickets += 1
        number = self._num_tickets
        ticket = encoder.encode(Ticket(self._socket.name, number))
        headers = {"Nats-Msg-Id": f"{self._socket.name}:{number}"}
        while self._waiting.get(job.id) is job:
            try:
                await self._nats.jetstream.publish(self._nats.tickets, ticket, headers=headers)
                return
            except APIError as error:
                if error.err_code == _STREAM_FULL and job.attempt == 1:
                    limit = self._nats.options.max_requests
                    self._events.rejected(
                        job, f"the queue of all servers is full, nats_max_requests is {limit}"
                    )
                    return
                logger.warning("a ticket could not be put into the queue: %s", error.description)
            except Exception as error:
                logger.debug("a ticket could not be put into the queue: %s", type(error).__name__)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _claim(self, message: Msg) -> None:
        """A worker has pulled a ticket of this server."""
        try:
            claim = claim_decoder.decode(message.data)
        except msgspec.MsgspecError as error:
            logger.error("a claim cannot be read: %s", error)
            return
        worker = self._events.worker(claim.worker)
        if worker is None:
            self._socket.send(claim.worker, Introduce())
            await message.respond(encoder.encode(Claimed()))
            self._acknowledge(claim.ack, _nak(_UNKNOWN_SECONDS))
            return
        waiting = _Claim(worker, claim.number, claim.ack, message.reply)
        job = next(
            (self._running[id] for id, held in self._held.items() if held.number == claim.number), None
        )
        if job is not None:
            if not self._has_stopped(job):
                self._held[job.id].ack = claim.ack
                self._answer(waiting, Claimed())
                return
            del self._held[job.id]
            self._events.worker_stopped(job, "it does not respond")
        worker.update(claim.credits)
        self._claims.append(waiting)
        self._events.pulled()

    def _has_stopped(self, job: Job) -> bool:
        return job.worker is None or self._socket.links.silence(job.worker.name) > SILENT_SECONDS

    def _answer(self, claim: _Claim, answer: Claimed) -> None:
        self._start(self._nats.client.publish(claim.answer, encoder.encode(answer)))

    def _acknowledge(self, ack: str, answer: bytes) -> None:
        self._start(self._nats.client.publish(ack, answer))

    async def _restore(self) -> None:
        """After a reconnection: if the stream was lost, put new tickets into the new one."""
        if await self._nats.create():
            logger.warning("the queue in NATS was lost and is created again")
            self._held.clear()
            for job in [*self._waiting.values()]:
                self._start(self._publish(job))

    async def _check(self) -> None:
        """Put new tickets into the stream if it has none although requests wait, for example after a purge."""
        while True:
            await asyncio.sleep(ENTRY_SECONDS)
            if not self._waiting:
                continue
            waiting = [*self._waiting.values()]
            try:
                state = (await self._nats.jetstream.stream_info(self._nats.stream)).state
            except Exception as error:
                logger.debug("the queue in NATS does not respond: %s", type(error).__name__)
                continue
            if not state.messages:
                for job in waiting:
                    self._start(self._publish(job))

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.debug("NATS: %s", type(task.exception()).__name__)


def _nak(seconds: float) -> bytes:
    """Return the message that lets JetStream deliver a ticket again after a time."""
    return b"-NAK " + msgspec.json.encode({"delay": int(seconds * 1e9)})
