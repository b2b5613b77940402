"""A request for inference, whatever protocol it came by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neso.server.tensor import Tensor

if TYPE_CHECKING:
    from neso.server.tracing import TraceParent

ParameterValue = bool | int | float | str


@dataclass(slots=True, eq=False)
class InferenceRequest:
    """Inputs and parameters for one execution of a model.

    `model_version` "" asks for the newest that is ready. `requested_outputs` empty asks for all.
    `classification`: outputs that are to be answered as their so many largest values. `parameters` holds what
    the client added beyond the protocol's own (those have fields here). `timeout_us` 0: none.
    `cacheable` is False where the inputs may change once the request was made, as in shared memory.
    `trace`: what the execution is a part of, where that is traced.
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
    _cancelled: bool = field(default=False, repr=False)
    _cancel_callbacks: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def cancelled(self) -> bool:
        """Whether the client gave up. Safe to read from any thread."""
        return self._cancelled

    def cancel(self) -> None:
        """Give up. Idempotent; runs the callbacks once. Call on the core's loop."""
        if self._cancelled:
            return
        self._cancelled = True
        callbacks, self._cancel_callbacks = self._cancel_callbacks, []
        for callback in callbacks:
            callback()

    def ended(self) -> None:
        """It is answered: forget the callbacks, which refer to what refers to this request and its tensors."""
        self._cancel_callbacks.clear()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` (on the core's loop) when the request is cancelled; at once if it was already."""
        if self._cancelled:
            callback()
        else:
            self._cancel_callbacks.append(callback)
