"""Protocol-independent inference request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neso.server.tensor import Tensor

if TYPE_CHECKING:
    from neso.generation import GenerationRequest, PoolingRequest
    from neso.server.backlog import Backlog
    from neso.server.shared_memory.regions import SharedMemoryWindow
    from neso.server.tracing import TraceParent

ParameterValue = bool | int | float | str


@dataclass(slots=True, eq=False)
class InferenceRequest:
    """One request to a model: tensors in `inputs`, or a `payload` for text generation or pooling.

    - model_version: "" for the newest ready version
    - requested_outputs: names of the outputs to return; all if empty
    - parameters: client parameters without a field of this class
    - timeout_us: 0 for none
    - cacheable: False if the inputs can change after submission (inputs in shared memory)
    - shared_inputs: the shared memory of inputs; keeps its regions until the request has ended
    - classification: output name to the number of top classes to return instead of the tensor
    - trace: the trace or model execution of this request; None if not traced
    - payload: None for a request with tensors
    - single_response: join the outputs of a text generation into one response
    - client: name of the client in the limits of `Admission`; "" if the request is part of another request; None: that
      of the current context
    - input_bytes: size of the request as received
    - backlog: backlog of the responses of the request that this request is a step of; None: the request has its own
    - kept_outputs: outputs that a worker of a stage keeps if they are large, for another stage; with True, the response
      has their elements too
    - cancelled: set by `cancel`; can be read by any thread
    """

    model_name: str
    inputs: dict[str, Tensor]
    model_version: str = ""
    id: str = ""
    requested_outputs: tuple[str, ...] = ()
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    cacheable: bool = True
    shared_inputs: tuple[SharedMemoryWindow, ...] = ()
    classification: dict[str, int] = field(default_factory=dict)
    trace: TraceParent | None = None
    payload: GenerationRequest | PoolingRequest | None = None
    single_response: bool = False
    client: str | None = None
    input_bytes: int = 0
    backlog: Backlog | None = None
    kept_outputs: dict[str, bool] = field(default_factory=dict)
    cancelled: bool = field(default=False, init=False)
    _cancel_callbacks: list[Callable[[], None]] = field(default_factory=list, init=False, repr=False)

    def cancel(self) -> None:
        """Cancel the request and run the callbacks once. Idempotent. Call on the core's loop."""
        for callback in self.begin_cancel():
            callback()

    def begin_cancel(self) -> list[Callable[[], None]]:
        """Mark the request as cancelled and return the callbacks, which the caller must run."""
        self.cancelled = True
        callbacks, self._cancel_callbacks = self._cancel_callbacks, []
        return callbacks

    def ended(self) -> None:
        """Drop the callbacks after the final response: they would keep reference cycles that contain tensors alive.

        Also drop `shared_inputs`: a backend can keep the request until its next execution.
        """
        self._cancel_callbacks.clear()
        self.shared_inputs = ()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the core's loop when the request is cancelled; immediately if it already is."""
        if self.cancelled:
            callback()
        else:
            self._cancel_callbacks.append(callback)
