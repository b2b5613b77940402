"""What crosses the socket between the server and the process of a model. Tensors of some size go beside it.

The fields are plain data: numbers, text, bytes, and tuples, lists and dictionaries of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Parameters = dict[str, "bool | int | float | str"]


class Block(NamedTuple):
    """A piece of shared memory. `segment` and `segment_size`: of the part of the file that holds it.

    `returned`: it is not the sender's, but one that the receiver has handed out before.
    """

    segment: int
    segment_size: int
    offset: int
    size: int
    returned: bool = False


class TensorData(NamedTuple):
    """A tensor in the binary tensor format: in `data`, or in `block` from its byte `start`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | None = None
    block: Block | None = None
    start: int = 0


class TraceData(NamedTuple):
    """The trace of a request: the number by which the server knows it, the name for people, and W3C's headers."""

    id: int
    name: str
    context: dict[str, str] | None


class RequestData(NamedTuple):
    """The fields of the server's `InferenceRequest`. `trace`: of its execution, or the one that a call belongs to."""

    model_name: str
    inputs: tuple[TensorData, ...]
    model_version: str
    id: str
    requested_outputs: tuple[str, ...]
    parameters: Parameters
    priority: int
    timeout_us: int
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool
    trace: TraceData | None


class ResponseData(NamedTuple):
    """The fields of the server's `InferenceResponse`; `error` is a message and a code."""

    outputs: tuple[TensorData, ...]
    parameters: Parameters
    error: tuple[str, str] | None
    final: bool
    made: int


# From the server


class Initialize(NamedTuple):
    """The first message: become an instance. `outputs` are datatypes by name, those of states included."""

    path: str
    args: dict[str, str]
    decoupled: bool
    outputs: dict[str, str]
    states: tuple[str, ...]
    iterative: bool
    log_level: int
    shm_default_size: int
    shm_growth_size: int


class Complete(NamedTuple):
    """The first message, instead: complete a configuration, and end."""

    path: str
    config: dict[str, Any]
    log_level: int


class Execute(NamedTuple):
    """One call of `execute`; each request has a number. `log_level`: of the server's log now, which may change."""

    work: int
    requests: tuple[tuple[int, RequestData], ...]
    log_level: int


class Cancel(NamedTuple):
    """The client of a request gave up."""

    number: int


class CallResponse(NamedTuple):
    """A response of another model to a `Call`."""

    call: int
    response: ResponseData


class CheckReady(NamedTuple):
    """Ask the model's `is_ready`; to be answered."""

    question: int


class Stop(NamedTuple):
    """Run `finalize` when what was sent before is done, and end."""


# From the process


class Hello(NamedTuple):
    """The process is there, and has imported what it needs to run a model."""


class Started(NamedTuple):
    """The model can execute; or cannot, for this reason."""

    error: str | None


class Completed(NamedTuple):
    """The configuration, or why there is none."""

    config: dict[str, Any] | None
    error: str | None


class Respond(NamedTuple):
    """A response to a request, with the times of its execution that are known so far."""

    number: int
    response: ResponseData
    input_end: int
    output_start: int


class Reschedule(NamedTuple):
    """A request is to be executed again; this process is done with it."""

    number: int


class Executed(NamedTuple):
    """`execute` has returned, and did well."""

    work: int
    input_end: int
    output_start: int


class Free(NamedTuple):
    """The instance can take the next work."""

    work: int


class Call(NamedTuple):
    """Have another model execute a request."""

    call: int
    request: RequestData
    decoupled: bool


class CancelCall(NamedTuple):
    """Nobody wants the rest of a call."""

    call: int


class Ask(NamedTuple):
    """Something else of the server; to be answered. `what` is a method of `ModelServices`."""

    question: int
    what: str
    arguments: tuple[Any, ...]


class Drop(NamedTuple):
    """A metric, or a family, that the model has let go of."""

    handle: int


class Log(NamedTuple):
    """A line for the server's log. `fields`: what it is about."""

    logger: str
    level: int
    message: str
    path: str
    line: int
    fields: dict[str, str]


class Ended(NamedTuple):
    """`finalize` has returned."""


# From both


class Answer(NamedTuple):
    """To a question of the other side: a value, or an error as message and code."""

    question: int
    value: Any = None
    error: tuple[str, str] | None = None


class Release(NamedTuple):
    """Blocks of the receiver's that nobody here looks at any more, by their offsets."""

    offsets: tuple[int, ...]


Message = (
    Initialize | Complete | Execute | Cancel | CallResponse | CheckReady | Stop
    | Hello | Started | Completed | Respond | Reschedule | Executed | Free | Call | CancelCall | Ask | Drop | Log
    | Ended | Answer | Release
)  # fmt: skip

MESSAGES = {
    kind.__name__: kind
    for kind in (
        Block, TensorData, TraceData, RequestData, ResponseData,
        Initialize, Complete, Execute, Cancel, CallResponse, CheckReady, Stop,
        Hello, Started, Completed, Respond, Reschedule, Executed, Free, Call, CancelCall, Ask, Drop, Log, Ended,
        Answer, Release,
    )
}  # fmt: skip
"""The classes that may be made from what comes through the socket."""
