"""Protocol of the engine's add-ons: per-sequence features beyond plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from neso.engine.core.request import SequenceOutput
    from neso.engine.core.scheduler import Scheduler
    from neso.engine.core.sequence import Sequence
    from neso.engine.core.stats import StepCounts
    from neso.engine.core.step import DraftTokens, Step


class RequestError(ValueError):
    """A request cannot run or continue. The message is for the client; `field` is the invalid parameter."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


Failures = list[tuple["Sequence", RequestError]]
"""Sequences whose requests end with an error."""


class Addon:
    """A feature of the engine. The default implementation of every hook does nothing.

    An add-on stores its state of a sequence in `sequence.addons[self]`, which is freed with the sequence. The add-ons
    of an engine are listed in `neso.engine.addons.standard_addons`; hooks are called in the order of the list.
    """

    # -- life of a sequence -------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        """Attach state before a request is queued. Raises `RequestError` to reject the request."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Attach state to `child`, which runs and continues on the blocks of `parent`.

        `child` has no state of this add-on yet.
        """

    def release(self, sequence: Sequence) -> None:
        """Return shared resources of a sequence that has ended, in any state."""

    # -- scheduling ---------------------------------------------------------------------------------------------

    def begin_step(self, scheduler: Scheduler) -> Failures:
        """Do background work and propose drafts. Called before every step is scheduled."""
        return []

    def can_start(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may start now. It does not block the sequences behind it in the queue."""
        return True

    def start(self, sequence: Sequence) -> None:
        """Called when a waiting sequence starts to run."""

    def stop(self, sequence: Sequence) -> None:
        """Called when a running sequence is preempted or released."""

    def draft(self, sequence: Sequence, num_new_tokens: int) -> DraftTokens | None:
        """Return draft tokens that follow the known tokens of a sequence, of which a step computes the last.

        The step computes all or the first of them. Their tokens may be set until `extend`, their number is final. They
        count as computed once the add-on adds them to `num_computed_tokens`. Called only for sequences with state of an
        add-on. `num_new_tokens`: number of known tokens in the step.
        """
        return None

    def has_work(self) -> bool:
        """Whether steps are needed to finish background work, even if no sequence waits for it."""
        return False

    def wait(self, timeout: float) -> None:
        """Wait for background work, at most `timeout` seconds. Called when no sequence can run."""

    # -- steps --------------------------------------------------------------------------------------------------

    def prepare(self, step: Step, scheduler: Scheduler) -> Failures:
        """Provide the inputs of a scheduled step. Failed sequences are removed from the step."""
        return []

    # Called only if a sequence of the step has state of this add-on.

    def extend(self, step: Step) -> None:
        """Add logits rows and inputs for the runner (`PlanPart`). Must not change anything except the step."""

    def update(self, step: Step, logits: Any, scheduler: Scheduler) -> list[SequenceOutput]:
        """Process the results of a step. `logits` are the runner's, indexed by `step.logits_rows`."""
        return []

    def set_wake(self, wake: Callable[[], None]) -> None:
        """Take a thread-safe function that makes an idle engine call `has_work`, for background work."""

    def close(self) -> None:
        """End background work. Called when the engine ends."""

    # -- monitoring ---------------------------------------------------------------------------------------------

    def observe(self, counts: StepCounts, seconds: float) -> None:
        """Called with the duration of every step in seconds."""

    def stats(self) -> dict[str, Any]:
        """Return fields of `EngineStats`."""
        return {}

    def check_integrity(self, scheduler: Scheduler) -> None:
        """Check the add-on's accounting. Raises `IntegrityError`."""


A = TypeVar("A", bound=Addon)


def overriding(addons: Iterable[A], hook: str) -> list[A]:
    """Return the add-ons that implement a hook, so that a step calls only those."""
    return [addon for addon in addons if getattr(type(addon), hook) is not getattr(Addon, hook)]
