"""The worker's side of a queue in NATS JetStream: it pulls tickets when it has room, and serves all servers."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket as sockets
from typing import TYPE_CHECKING

import msgspec

from neso import __version__
from neso.cluster.agent import run_together
from neso.cluster.jetstream.connection import (
    ACK_SECONDS,
    BEAT_SECONDS,
    Member,
    NatsConnection,
    NatsOptions,
)
from neso.cluster.jetstream.links import Links
from neso.cluster.jetstream.messages import Claim, claimed_decoder, encoder, ticket_decoder
from neso.cluster.messages import FromWorker, Hello
from neso.cluster.messages import encoder as worker_encoder

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from neso.cluster.worker import Worker

logger = logging.getLogger(__name__)

_PULL_SECONDS = 2.0
"""A request for a ticket is repeated after this time: a restarted server of NATS has forgotten it."""
_CLAIM_SECONDS = 5.0
_GRANT_SECONDS = 1.0
_RETRY_SECONDS = 1.0
_MAX_DELIVERIES = 5
"""A ticket is removed after as many deliveries if its server is not in the bucket."""


class NatsServers:
    """The servers of a queue, as a worker sees them."""

    greeted: tuple[str, ...] = ()

    def __init__(self, connection: NatsConnection, name: str) -> None:
        self._nats, self._name = connection, name
        self._links = Links(connection, name, "worker", "server")
        self._session = secrets.token_hex(6)
        self._member: Member | None = None

    @classmethod
    async def open(cls, options: NatsOptions, name: str, digest: str) -> NatsServers:
        """Connect. Raises `EngineError`, also if the queue serves another model."""
        connection = await NatsConnection.open(options, f"neso worker {name}")
        try:
            await connection.check_model(digest)
            self = cls(connection, name)
            await self._links.open()
        except BaseException:
            await connection.close()
            raise
        return self

    async def receive(self) -> tuple[str, bytes | None]:
        """Return the name of a server and its encoded message; None: messages were lost."""
        return await self._links.receive()

    def send(self, server: str, message: FromWorker) -> bool:
        """Send a message. Returns False if the server has gone."""
        reached = self._links.send(server, worker_encoder.encode(message), start=isinstance(message, Hello))
        if not reached:
            self._links.forget(server)
        return reached

    def refused(self, server: str, reason: str) -> None:
        """A server does not accept this worker: others may."""
        logger.error("the server '%s' refuses this worker: %s", server, reason)

    async def run(self, worker: Worker) -> None:
        """Announce the worker and pull tickets."""
        work = [self._announce(worker), self._extend(worker)]
        if "decode" in worker.roles:
            work.append(self._pull(worker))
        await run_together(*work)

    async def close(self) -> None:
        """Leave the queue."""
        await self._links.flush()
        if self._member is not None:
            await self._nats.leave(self._member)
        self._links.close()
        await self._nats.close()

    async def _announce(self, worker: Worker) -> None:
        while True:
            credits = worker.credits()
            self._member = Member(
                kind="worker",
                name=self._name,
                host=sockets.gethostname(),
                pid=os.getpid(),
                model=worker.digest,
                session=self._session,
                version=__version__,
                roles=sorted(worker.roles),
                requests=worker.num_requests,
                free_sequences=credits.sequences,
            )
            try:
                await self._nats.announce(self._member)
            except Exception as error:
                logger.debug("this worker could not be announced: %s", type(error).__name__)
            await asyncio.sleep(BEAT_SECONDS)

    async def _extend(self, worker: Worker) -> None:
        """Tell JetStream regularly that the requests of this worker are worked on."""
        while True:
            await asyncio.sleep(ACK_SECONDS / 4)
            for ticket in worker.tickets():
                await self._publish(ticket, b"+WPI")

    async def _pull(self, worker: Worker) -> None:
        """Pull one ticket after the other, so that idle workers take turns; claims go on meanwhile."""
        subscription = await self._nats.jetstream.pull_subscribe_bind("workers", self._nats.stream)
        claims: set[asyncio.Task[None]] = set()

        def claimed(task: asyncio.Task[None]) -> None:
            claims.discard(task)
            worker.changed()

        try:
            while True:
                await worker.wait_until(lambda: worker.has_room(len(claims)))
                try:
                    [message] = await subscription.fetch(1, timeout=_PULL_SECONDS)
                except asyncio.TimeoutError:
                    continue
                except Exception as error:
                    logger.debug("pulling is repeated: %s", type(error).__name__)
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                task = asyncio.create_task(self._claim(worker, message))
                claims.add(task)
                task.add_done_callback(claimed)
        finally:
            for task in tuple(claims):
                task.cancel()

    async def _claim(self, worker: Worker, message: Msg) -> None:
        """Ask the server of a ticket for a request."""
        from nats.errors import NoRespondersError

        try:
            ticket = ticket_decoder.decode(message.data)
        except msgspec.MsgspecError as error:
            logger.error("a ticket cannot be read: %s", error)
            await self._publish(message.reply, b"+TERM")
            return
        claim = encoder.encode(
            Claim(self._name, ticket.number, message.reply, worker.credits_for(ticket.server))
        )
        subject = f"{self._nats.prefix}.claims.{ticket.server}"
        try:
            answer = await self._nats.client.request(subject, claim, timeout=_CLAIM_SECONDS)
            claimed = claimed_decoder.decode(answer.data)
        except NoRespondersError:
            gone = message.metadata.num_delivered >= _MAX_DELIVERIES and not await self._is_known(
                ticket.server
            )
            delay = b'-NAK {"delay": %d}' % int(_RETRY_SECONDS * 1e9)
            await self._publish(message.reply, b"+TERM" if gone else delay)
            return
        except Exception as error:
            logger.debug("a claim was not answered: %s", type(error).__name__)
            return  # JetStream delivers the ticket again
        if claimed.request_id is not None:
            await worker.wait_for_grant(ticket.server, claimed.request_id, claimed.attempt, _GRANT_SECONDS)

    async def _is_known(self, server: str) -> bool:
        try:
            return any(member.name == server for member in await self._nats.members())
        except Exception:
            return True

    async def _publish(self, subject: str, data: bytes) -> None:
        try:
            await self._nats.client.publish(subject, data)
        except Exception as error:
            logger.debug("a message to JetStream is lost: %s", type(error).__name__)
