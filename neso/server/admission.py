"""Limits on the requests in flight, so that no client can fill the server's memory or keep others waiting.

A sequence is one output of a language model (`n`, `best_of` and beams count), one text to embed or score, or one
request to another model. A client is an API key or, without keys, an address (IPv6: a /64 network). Requests of models
to other models are part of the request that caused them, and are not counted.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from neso.flags import Flag, integer
from neso.server.errors import InvalidArgument, Overloaded

if TYPE_CHECKING:
    from neso.server.shared_counts import SharedCounts

CLIENT: ContextVar[str] = ContextVar("client", default="")
"""Client of the current request, for frontends that do not set `InferenceRequest.client`; "" outside a request."""

_FAIR_SEQUENCES = 64
"""Sequences that a client may have in flight without any effect on the order of its requests."""
_SECONDS_PER_SEQUENCE = 0.05
"""Delay in the waiting queue of a request, for each sequence above `_FAIR_SEQUENCES` that its client has in flight."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits on the requests in flight. Raises `InvalidArgument` for limits that contradict each other."""

    request_sequences: Annotated[
        int,
        Flag(
            "max-request-sequences",
            "Maximum number of sequences of one request: prompts times n, best_of or beams, or texts to embed.",
            integer(1),
        ),
    ] = 2048
    client_sequences: Annotated[
        int,
        Flag(
            "max-client-sequences",
            "Maximum number of sequences in flight of one client: an API key, or an address without keys.",
            integer(1),
        ),
    ] = 4096
    sequences: Annotated[
        int, Flag("max-sequences", "Maximum number of sequences in flight of all clients.", integer(1))
    ] = 16384
    input_bytes: Annotated[
        int,
        Flag(
            "max-inflight-input-bytes",
            "Maximum size of the inputs in flight in bytes. One client may use half of it.",
            integer(1),
        ),
    ] = 1 << 30

    def __post_init__(self) -> None:
        if not self.request_sequences <= self.client_sequences <= self.sequences:
            raise InvalidArgument(
                "expected --max-request-sequences <= --max-client-sequences <= --max-sequences, got "
                f"{self.request_sequences}, {self.client_sequences}, {self.sequences}"
            )


class _Client:
    """What a client has in flight."""

    __slots__ = ("input_bytes", "name", "sequences")

    def __init__(self, name: str) -> None:
        self.name = name
        self.sequences = 0
        self.input_bytes = 0


class Admission:
    """Counts the requests in flight. Used on the core's event loop.

    `shared`: counts of sequences and input bytes of all server processes; None if there is one process.
    """

    def __init__(
        self, limits: AdmissionLimits, shared: tuple[SharedCounts, SharedCounts] | None = None
    ) -> None:
        self.limits = limits
        self.shared = shared
        self.sequences = 0
        self.input_bytes = 0
        self.clients: dict[str, _Client] = {}

    @property
    def num_clients(self) -> int:
        """Number of clients with requests in flight."""
        return len(self.clients)

    def reserve(self, sequences: int) -> None:
        """Count the current request before its parts are admitted one by one; they then take from `RESERVATION`.

        Otherwise many such requests would be begun at the same time, and none could be completed. Raises
        `InvalidArgument`, `Overloaded`.
        """
        self.check_request(sequences)
        reservation, name = RESERVATION.get(), CLIENT.get()
        if reservation is not None and name:
            reservation.ticket = self.admit(name, sequences, 0)

    def check_request(self, sequences: int) -> None:
        """Check the number of sequences of one request. Raises `InvalidArgument`."""
        limit = self.limits.request_sequences
        if sequences > limit:
            raise InvalidArgument(
                f"the request has {sequences} sequences, at most {limit} are allowed (--max-request-sequences)"
            )

    def admit(self, name: str, sequences: int, input_bytes: int) -> Ticket:
        """Count a request of the client `name`. Raises `InvalidArgument`, `Overloaded`."""
        limits = self.limits
        if sequences > limits.request_sequences:
            self.check_request(sequences)
        client = self.clients.get(name)
        if client is None:
            client = _Client(name)
        client_sequences, client_bytes = client.sequences + sequences, client.input_bytes + input_bytes
        total_sequences, total_bytes = self.sequences + sequences, self.input_bytes + input_bytes
        # This runs for every request, so `_check` is called only if a limit may be exceeded.
        if (
            self.shared is not None
            or client_sequences > limits.client_sequences
            or total_sequences > limits.sequences
            or client_bytes > limits.input_bytes // 2
            or total_bytes > limits.input_bytes
        ):
            self._check(client, sequences, input_bytes)
        excess = client.sequences - _FAIR_SEQUENCES
        if self.shared is not None:
            excess += self.shared[0].elsewhere(name)
            self._publish(name, sequences, input_bytes)
        if not client.sequences:
            self.clients[name] = client
        client.sequences, client.input_bytes = client_sequences, client_bytes
        self.sequences, self.input_bytes = total_sequences, total_bytes
        return Ticket(
            self, client, sequences, input_bytes, _SECONDS_PER_SEQUENCE * excess if excess > 0 else 0.0
        )

    def _check(self, client: _Client, sequences: int, input_bytes: int) -> None:
        limits = self.limits
        client_sequences, client_bytes = client.sequences, client.input_bytes
        total_sequences, total_bytes = self.sequences, self.input_bytes
        if self.shared is not None:
            shared_sequences, shared_bytes = self.shared
            client_sequences += shared_sequences.elsewhere(client.name)
            client_bytes += shared_bytes.elsewhere(client.name)
            total_sequences += shared_sequences.elsewhere()
            total_bytes += shared_bytes.elsewhere()
        if client_sequences + sequences > limits.client_sequences:
            raise Overloaded(
                f"too many requests: this client has {client_sequences} sequences in flight, at most "
                f"{limits.client_sequences} are allowed"
            )
        if total_sequences + sequences > limits.sequences:
            raise Overloaded(f"the server is overloaded: {total_sequences} sequences are in flight")
        # One request is always accepted: the frontends limit its size.
        if client_bytes and client_bytes + input_bytes > limits.input_bytes // 2:
            raise Overloaded(f"too many requests: this client has inputs of {client_bytes} bytes in flight")
        if total_bytes and total_bytes + input_bytes > limits.input_bytes:
            raise Overloaded(f"the server is overloaded: inputs of {total_bytes} bytes are in flight")

    def _publish(self, name: str, sequences: int, input_bytes: int) -> None:
        """Add to the counts of this process that the others see."""
        if self.shared is not None:
            self.shared[0].add(name, sequences)
            self.shared[1].add(name, input_bytes)


class Ticket:
    """The part of a request in the limits. `release` when the request has ended."""

    __slots__ = ("_admission", "client", "input_bytes", "queue_delay", "sequences")

    def __init__(
        self, admission: Admission, client: _Client, sequences: int, input_bytes: int, queue_delay: float
    ) -> None:
        self._admission = admission
        self.client = client
        self.sequences = sequences
        self.input_bytes = input_bytes
        self.queue_delay = queue_delay
        """Seconds by which requests of other clients may arrive later and still go first."""

    def grow(self, sequences: int) -> None:
        """Count further sequences of a request that has not ended. Raises `InvalidArgument`, `Overloaded`."""
        if sequences > 0 and self.sequences:
            self._admission.check_request(self.sequences + sequences)
            self._admission._check(self.client, sequences, 0)
            self._admission.sequences += sequences
            self._admission._publish(self.client.name, sequences, 0)
            self.client.sequences += sequences
            self.sequences += sequences

    def release(self) -> None:
        """Return the part of the request. Idempotent."""
        if self.sequences:
            self._give_back(self.sequences, self.input_bytes)

    def shrink(self, sequences: int) -> None:
        """Return some of the sequences, all of them if there are fewer."""
        if sequences < self.sequences:
            self._give_back(sequences, 0)
        else:
            self.release()

    def _give_back(self, sequences: int, input_bytes: int) -> None:
        admission, client = self._admission, self.client
        if admission.shared is not None:
            admission._publish(client.name, -sequences, -input_bytes)
        self.sequences -= sequences
        self.input_bytes -= input_bytes
        admission.sequences -= sequences
        admission.input_bytes -= input_bytes
        client.sequences -= sequences
        client.input_bytes -= input_bytes
        if not client.sequences:
            del admission.clients[client.name]


class Reservation:
    """Sequences of a request that are counted before its parts are. `ticket`: None if there are none."""

    __slots__ = ("ticket",)

    def __init__(self) -> None:
        self.ticket: Ticket | None = None

    def take(self, sequences: int) -> None:
        """Return the sequences of a part, which is about to be admitted."""
        if self.ticket is not None:
            self.ticket.shrink(sequences)

    def release(self) -> None:
        """Return what no part has taken. Idempotent."""
        if self.ticket is not None:
            self.ticket.release()


RESERVATION: ContextVar[Reservation | None] = ContextVar("reservation", default=None)
"""Reservation of the current request, if its parts are submitted separately."""
