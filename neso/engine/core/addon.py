"""The protocol of the engine's add-ons: features that act on some sequences beside plain decoding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from neso.engine.core.request import SequenceOutput
    from neso.engine.core.scheduler import Scheduler
    from neso.engine.core.sequence import Sequence
    from neso.engine.core.stats import StepCounts
    from neso.engine.core.step import Step


class RequestError(ValueError):
    """A request cannot run, or cannot go on. The message is for the client; `field` is the parameter at fault."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


Failures = list[tuple["Sequence", RequestError]]
"""Sequences whose requests end with an error."""


class Addon:
    """A feature of the engine. No hook does anything unless it is overridden.

    An add-on keeps what it knows of a sequence in `sequence.addons[self]`, which is freed with the sequence.
    The add-ons of an engine are one list (`neso.engine.addons.standard_addons`); hooks are called in its order.
    """

    # -- life of a sequence -------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        """A request is about to be queued: attach state. Raises `RequestError` to refuse the request."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` runs and continues on the blocks of `parent`; it has none of the parent's state yet."""

    def release(self, sequence: Sequence) -> None:
        """The sequence has ended, in whatever state. Only needed to return what others own."""

    # -- scheduling ---------------------------------------------------------------------------------------------

    def begin_step(self, scheduler: Scheduler) -> Failures:
        """Called before every step is scheduled, for background work and proposals."""
        return []

    def can_start(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may start now. Those behind it in the queue do not wait for it."""
        return True

    def start(self, sequence: Sequence) -> None:
        """A waiting sequence starts to run."""

    def stop(self, sequence: Sequence) -> None:
        """A running sequence is preempted or released."""

    def has_work(self) -> bool:
        """Whether steps are needed to finish background work, even if no sequence waits for it."""
        return False

    def wait(self, timeout: float) -> None:
        """No sequence can run: wait for background work, at most `timeout` seconds."""

    # -- steps --------------------------------------------------------------------------------------------------

    def prepare(self, step: Step, scheduler: Scheduler) -> Failures:
        """A step is scheduled: provide what its sequences need. Failed ones are removed from the step."""
        return []

    def extend(self, step: Step) -> None:
        """Add logits rows and extensions of the plan. Changes nothing but the step."""

    def update(self, step: Step, logits: Any, scheduler: Scheduler) -> list[SequenceOutput]:
        """The step has run: take its results. `logits` are the runner's, by `step.logits_rows`."""
        return []

    def observe(self, counts: StepCounts, seconds: float) -> None:
        """How long a step took."""

    # -- monitoring ---------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Fields of `EngineStats`."""
        return {}

    def check_integrity(self, scheduler: Scheduler) -> None:
        """Raises `IntegrityError`."""


A = TypeVar("A", bound=Addon)


def overriding(addons: Iterable[A], hook: str) -> list[A]:
    """The add-ons that have a hook: a step calls no others."""
    return [addon for addon in addons if getattr(type(addon), hook) is not getattr(Addon, hook)]
