"""Protocol-independent inference request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neso.server.tensor import Tensor

if TYPE_CHECKING:
    from neso.generation import GenerationRequest, PoolingRequest
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
    - classification: output name to the number of top classes to return instead of the tensor
    - trace: the trace or model execution of this request; None if not traced
    - payload: None for a request with tensors
    - single_response: join the outputs of a text generation into one response
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
    classification: dict[str, int] = field(default_factory=dict)
    trace: TraceParent | None = None
    payload: GenerationRequest | PoolingRequest | None = None
    single_response: bool = False
    cancelled: bool = field(default=False, init=False)
    _cancel_callbacks: list[Callable[[], None]] = field(default_factory=list, init=False, repr=False)

    def cancel(self) -> None:
        """Cancel the request and run the callbacks once. Idempotent. Call on the core's loop."""
        if self.cancelled:
            return
        self.cancelled = True
        callbacks, self._cancel_callbacks = self._cancel_callbacks, []
        for callback in callbacks:
            callback()

    def ended(self) -> None:
        """Drop the callbacks after the final response: they would keep reference cycles that contain tensors alive."""
        self._cancel_callbacks.clear()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the core's loop when the request is cancelled; immediately if it already is."""
        if self.cancelled:
            callback()
        else:
            self._cancel_callbacks.append(callback)
