"""Messages between a server and the workers of its stages, encoded as msgpack.

`Refused`, `Welcome`, `Introduce`, `Ping`, `Goodbye` and `Leave` are those of `neso.cluster.messages`.
"""

from __future__ import annotations

import msgspec

from neso.cluster.messages import Goodbye, Introduce, Leave, Ping, Refused, Welcome
from neso.cluster.stages.tensors import TensorRef
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import EngineInfo
from neso.server.metrics.registry import SampleKey

PROTOCOL_VERSION = 2
"""Both sides must have the same version."""

Durations = tuple[int, int, int]
"""Durations of compute input, infer and output, in ns."""


class StageHello(msgspec.Struct, frozen=True, tag="stage-hello"):
    """A worker introduces itself.

    - signature: inputs, outputs, batching and transaction policy of its model, see `signature_digest`
    - slots: number of batch entries that it executes at a time
    - host_id: identifies the running system, see `TensorRef`; labels: classification labels by output
    - engine: properties of the engine of a language model; max_queue_size: limit of waiting requests of its options
    """

    version: int
    name: str
    host: str
    pid: int
    model: str
    model_version: str
    signature: str
    slots: int
    host_id: str
    decoupled: bool
    labels: dict[str, list[str]]
    engine: EngineInfo | None = None
    max_queue_size: int | None = None


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """A response: an encoded `Response` of `neso.server.processes.messages`.

    - durations: with the last one; refs: outputs that the worker keeps, which can be in the response too
    - reading: with the last one, if other workers have kept inputs: duration in ns, and "shm" or "tcp"
    """

    number: int
    attempt: int
    response: msgspec.Raw
    durations: Durations | None = None
    refs: dict[str, TensorRef] = {}
    reading: tuple[int, str] | None = None


class StageReport(msgspec.Struct, frozen=True, tag="stage-report"):
    """Responses, if any; also sent regularly as a heartbeat.

    - accepts: False if the worker takes no more requests
    - stats: of its engine; counts: by what its counters and histograms have changed. Both only with heartbeats
    """

    accepts: bool
    outcomes: list[Outcome] = []
    stats: EngineStats | None = None
    counts: list[tuple[SampleKey, float]] = []


class Task(msgspec.Struct, frozen=True, array_like=True):
    """A request for the worker: an encoded `Infer` of `neso.server.processes.messages`.

    - refs: inputs that other workers keep
    - keep: outputs that the worker keeps if they are large; with True they are in the response too
    """

    number: int
    attempt: int
    request: msgspec.Raw
    refs: dict[str, TensorRef] = {}
    keep: dict[str, bool] = {}


class Work(msgspec.Struct, frozen=True, tag="work"):
    """Requests that are given to the worker at the same time, so that they can be one batch."""

    tasks: list[Task]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Cancel an attempt."""

    number: int
    attempt: int


class Flow(msgspec.Struct, frozen=True, tag="flow"):
    """Send no more responses of an attempt for now, or send them again: its client is slow."""

    number: int
    attempt: int
    paused: bool


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Kept tensors that are no longer needed."""

    numbers: list[int]


FromStageWorker = StageHello | StageReport | Leave
ToStageWorker = Welcome | Refused | Introduce | Work | Stop | Flow | Release | Ping | Goodbye

from_worker: msgspec.msgpack.Decoder[FromStageWorker] = msgspec.msgpack.Decoder(FromStageWorker)
to_worker: msgspec.msgpack.Decoder[ToStageWorker] = msgspec.msgpack.Decoder(ToStageWorker)
