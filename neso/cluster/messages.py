"""Messages between a front end and its workers, encoded as msgpack."""

from __future__ import annotations

import msgspec

from neso.engine.cluster_config import MIXED, Roles
from neso.engine.core.prefix_keys import BlockChanges
from neso.engine.core.request import SequenceOutput
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import Command, EngineInfo, Integrity, LoraDone, LoraNames

PROTOCOL_VERSION = 1
"""Both sides must have the same version."""


class Cost(msgspec.Struct, frozen=True, array_like=True):
    """What a request takes of a worker: sequences, blocks for its known tokens, and tokens to prefill."""

    sequences: int = 0
    blocks: int = 0
    prefill_tokens: int = 0

    def plus(self, other: Cost) -> Cost:
        """Return the sums."""
        return Cost(
            self.sequences + other.sequences,
            self.blocks + other.blocks,
            self.prefill_tokens + other.prefill_tokens,
        )


class Credits(msgspec.Struct, frozen=True, array_like=True):
    """What a worker can take now, beside the requests that it has.

    - grants: number of grants that it had received when it computed its credits
    - idle: it has no request, so it takes any request, however large
    """

    sequences: int = 0
    blocks: int = 0
    prefill_tokens: int = 0
    grants: int = 0
    idle: bool = False

    def cover(self, reserved: Cost, cost: Cost) -> bool:
        """Whether there is room for `cost` beside `reserved`, which later grants have taken.

        The prefill budget may be exceeded by the last request, so that a long prompt does not wait for an empty budget.
        """
        if self.idle and not reserved.sequences:
            return True
        return (
            reserved.sequences + cost.sequences <= self.sequences
            and reserved.blocks + cost.blocks <= self.blocks
            and reserved.prefill_tokens < self.prefill_tokens
        )


# -- from a worker ----------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker introduces itself. `model`: digest of the checkpoint and the options that change results."""

    version: int
    name: str
    host: str
    pid: int
    model: str
    info: EngineInfo
    roles: Roles = MIXED
    loras: dict[str, str | None] = {}


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """An output of a sequence. `start`: index of its first token among the output tokens of the sequence."""

    attempt: int
    start: int
    output: SequenceOutput


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Outputs of a step and changes of the prefix cache, if any; also sent regularly as a heartbeat.

    `sent_ns`: time of the worker's monotonic clock, to which times in the outputs refer; 0: that of the front end.
    """

    credits: Credits
    stats: EngineStats
    frames: list[Frame] = []
    blocks: list[BlockChanges] = []
    sent_ns: int = 0


class EngineEvent(msgspec.Struct, frozen=True, tag="event"):
    """An event of the worker's engine that belongs to no request."""

    event: LoraDone | LoraNames | Integrity


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The worker ends, or its engine could not be loaded: its requests go to other workers."""

    reason: str


FromWorker = Hello | Report | EngineEvent | Leave


# -- from the front end -----------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The worker may pull. `silence`: seconds without a message after which each side gives the other up; 0: never."""

    silence: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The worker does not fit the model of the front end."""

    reason: str


class Introduce(msgspec.Struct, frozen=True, tag="introduce"):
    """The front end does not know the worker, or has given it up: abort all requests and send `Hello`."""


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """A request for the worker: an encoded `EngineRequest`.

    `ticket`: subject at which the worker tells a queue in JetStream that it works on the request; "": there is none.
    """

    request_id: str
    attempt: int
    cost: Cost
    request: msgspec.Raw
    ticket: str = ""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Abort an attempt, or one of its sequences."""

    request_id: str
    attempt: int
    index: int | None = None


class Tell(msgspec.Struct, frozen=True, tag="tell"):
    """A command for the worker's engine that belongs to no request."""

    command: Command


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """The front end is alive."""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The front end ends: abort its requests."""


ToWorker = Welcome | Refused | Introduce | Grant | Cancel | Tell | Ping | Goodbye

encoder = msgspec.msgpack.Encoder()
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
