"""Messages between the server and the process of a model. Large tensors are passed in shared memory.

Fields are plain data: numbers, strings, bytes, and tuples, lists and dictionaries of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Parameters = dict[str, "bool | int | float | str"]


class Block(NamedTuple):
    """A block of shared memory. Offsets and sizes are in bytes of the file.

    - segment, segment_size: offset and size of the mapped segment that contains the block
    - returned: whether the block belongs to the receiver, which sent it before; otherwise it belongs to the sender
    """

    segment: int
    segment_size: int
    offset: int
    size: int
    returned: bool = False


class TensorData(NamedTuple):
    """A tensor in the binary tensor format: in `data`, or in `block` starting at byte `start`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | None = None
    block: Block | None = None
    start: int = 0


class TraceData(NamedTuple):
    """Trace of a request: the server's id of the trace, its name, and the W3C trace context headers."""

    id: int
    name: str
    context: dict[str, str] | None


class RequestData(NamedTuple):
    """Fields of the server's `InferenceRequest`. `trace`: of the execution; in BLS calls, of the calling request."""

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


class ErrorData(NamedTuple):
    """A `ServerError`. `kind`: name of its class; `retry_after`: see `Unavailable`."""

    message: str
    kind: str
    retry_after: int


class ResponseData(NamedTuple):
    """Fields of the server's `InferenceResponse`."""

    outputs: tuple[TensorData, ...]
    parameters: Parameters
    error: ErrorData | None
    final: bool
    created_ns: int


# Server to child


class Initialize(NamedTuple):
    """First message: run an instance. `outputs`: datatypes by name, including states.

    `file`, `folder`: see `ModelCode`.
    """

    file: str
    folder: str
    args: dict[str, str]
    decoupled: bool
    outputs: dict[str, str]
    states: tuple[str, ...]
    iterative: bool
    log_level: int
    shm_default_size: int
    shm_growth_size: int


class AutoComplete(NamedTuple):
    """Alternative first message: auto-complete a configuration, then exit."""

    file: str
    folder: str
    config: dict[str, Any]
    log_level: int


class Execute(NamedTuple):
    """One call of `execute`, with numbered requests. `log_level`: current log level of the server."""

    work: int
    requests: tuple[tuple[int, RequestData], ...]
    log_level: int


class Cancel(NamedTuple):
    """A request was cancelled."""

    number: int


class Pause(NamedTuple):
    """The client of a request reads slowly: wait before the next response to it."""

    number: int


class Resume(NamedTuple):
    """End of `Pause`."""

    number: int


class CallResponse(NamedTuple):
    """A response to a `Call`. `size`: bytes that it takes in the backlog of the call."""

    call: int
    response: ResponseData
    size: int = 0


class CheckReady(NamedTuple):
    """Call the model's `is_ready`. Answered by `Reply`."""

    query: int


class Stop(NamedTuple):
    """Finish the previously sent work, run `finalize` and exit."""


# Child to server


class Hello(NamedTuple):
    """The process has started and imported all modules that it needs to run a model."""


class Started(NamedTuple):
    """`initialize` has returned (`error` None) or failed."""

    error: str | None


class AutoCompleted(NamedTuple):
    """The completed configuration, or the error."""

    config: dict[str, Any] | None
    error: str | None


class Respond(NamedTuple):
    """A response to a request. Times are in ns of the monotonic clock, 0 if not known yet."""

    number: int
    response: ResponseData
    input_end: int
    output_start: int


class Reschedule(NamedTuple):
    """Return a request to the scheduler, to be executed again."""

    number: int


class Executed(NamedTuple):
    """`execute` has returned without an error."""

    work: int
    input_end: int
    output_start: int


class WorkDone(NamedTuple):
    """The instance has finished a work item and can execute the next one."""

    work: int


class Call(NamedTuple):
    """BLS: execute a request on another model."""

    call: int
    request: RequestData
    decoupled: bool


class CancelCall(NamedTuple):
    """Cancel a `Call`."""

    call: int


class TakenOfCall(NamedTuple):
    """The model has taken responses of a `Call`, of `size` bytes."""

    call: int
    size: int


class Query(NamedTuple):
    """Any other call to the server. Answered by `Reply`. `method`: see `ServerRequestHandler`."""

    query: int
    method: str
    arguments: tuple[Any, ...]


class DropHandle(NamedTuple):
    """The model has released a metric or a metric family."""

    handle: int


class Log(NamedTuple):
    """A record for the server's log. `fields`: structured fields, such as the model's name."""

    logger: str
    level: int
    message: str
    path: str
    line: int
    fields: dict[str, str]


class Finalized(NamedTuple):
    """`finalize` has returned; the process is about to exit."""


# Both directions


class Reply(NamedTuple):
    """Reply to `Query` or `CheckReady`: a value, or an error as message and code."""

    query: int
    value: Any = None
    error: ErrorData | None = None


class Release(NamedTuple):
    """Offsets of the receiver's blocks that the sender no longer uses."""

    offsets: tuple[int, ...]


Message = (
    Initialize | AutoComplete | Execute | Cancel | Pause | Resume | CallResponse | CheckReady | Stop
    | Hello | Started | AutoCompleted | Respond | Reschedule | Executed | WorkDone | Call | CancelCall | TakenOfCall
    | Query | DropHandle | Log | Finalized | Reply | Release
)  # fmt: skip

MESSAGES = {
    kind.__name__: kind
    for kind in (
        Block, TensorData, TraceData, RequestData, ErrorData, ResponseData,
        Initialize, AutoComplete, Execute, Cancel, Pause, Resume, CallResponse, CheckReady, Stop,
        Hello, Started, AutoCompleted, Respond, Reschedule, Executed, WorkDone, Call, CancelCall, TakenOfCall, Query,
        DropHandle, Log, Finalized, Reply, Release,
    )
}  # fmt: skip
"""Classes that the unpickler is allowed to instantiate."""
