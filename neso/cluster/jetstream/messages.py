"""Messages with which workers claim requests."""

from __future__ import annotations

import msgspec

from neso.cluster.messages import Credits


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """In the stream: a request waits in a server. `number`: counts the tickets of the server."""

    server: str
    number: int


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """From a worker that has pulled a ticket. `ack`: subject with which the ticket is acknowledged."""

    worker: str
    number: int
    ack: str
    credits: Credits


class Claimed(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a claim: the granted attempt; `request_id` is None if there is none for the worker now."""

    request_id: str | None = None
    attempt: int = 0


encoder = msgspec.msgpack.Encoder()
ticket_decoder: msgspec.msgpack.Decoder[Ticket] = msgspec.msgpack.Decoder(Ticket)
claim_decoder: msgspec.msgpack.Decoder[Claim] = msgspec.msgpack.Decoder(Claim)
claimed_decoder: msgspec.msgpack.Decoder[Claimed] = msgspec.msgpack.Decoder(Claimed)
