"""Rate limiter: decides which instance executes next among models that share resources.

Every instance has a turn, a number that grows by its priority with each of its executions. Waiting instances execute
in ascending order of their turns, so that under load an instance of priority 2 executes half as often as an instance of
priority 1. To prevent starvation, a waiting instance reserves its resources against instances with later turns;
instances that need other resources can overtake it. After a pause, an instance continues at the turn of the last
execution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from neso.server.config.scheduling import InstanceSpec, instances_of
from neso.server.errors import InvalidArgument
from neso.server.options import ResourceLimit
from neso.server.schedulers.dynamic_batcher import Dispatcher

ResourceKey = tuple[str, int | None]
"""Name of a resource and its device; None for a global resource."""

ResourceNeeds = dict[ResourceKey, int]
"""Resources that an instance holds while it executes."""


def needs_of(spec: InstanceSpec) -> ResourceNeeds:
    """Return the resources of an instance, from the `rate_limiter` of its group. Raises `InvalidArgument`."""
    needs: ResourceNeeds = {}
    for resource in spec.group.rate_limiter.resources:
        if not resource.name:
            raise InvalidArgument(f"a resource of instance group '{spec.group.name}' must have a name")
        if resource.count:
            needs[resource.name, None if getattr(resource, "global") else spec.device] = resource.count
    return needs


class Resources:
    """Amounts of resources: the configured limits, or without any limits the maximum that an instance needs.

    If there are limits, resources without a limit have an amount of 0.
    """

    def __init__(self, limits: Sequence[ResourceLimit] = ()) -> None:
        self._limits = tuple(limits)
        self._needs_by_owner: dict[object, list[ResourceNeeds]] = {}
        self._available: ResourceNeeds = {}  # total amount of each declared resource
        self._used: Counter[ResourceKey] = Counter()

    def register(self, owner: object, needs: list[ResourceNeeds]) -> None:
        """Register a model. Raises `InvalidArgument`, without registering it, if its needs exceed the total amounts."""
        self._needs_by_owner[owner] = needs
        try:
            self._recount()
        except InvalidArgument:
            self.remove(owner)
            raise

    def remove(self, owner: object) -> None:
        """Remove a model."""
        self._needs_by_owner.pop(owner, None)
        self._recount()

    def available(self, key: ResourceKey) -> int:
        """Return the total amount of a resource."""
        return self._available.get(key, 0)

    def fits(self, needs: ResourceNeeds) -> bool:
        """Return whether the resources are free."""
        return all(self._used[key] + count <= self.available(key) for key, count in needs.items())

    def acquire(self, needs: ResourceNeeds) -> None:
        self._used.update(needs)

    def release(self, needs: ResourceNeeds) -> None:
        self._used.subtract(needs)

    def _recount(self) -> None:
        most: ResourceNeeds = {}
        for needs in self._all_needs():
            for key, count in needs.items():
                most[key] = max(most.get(key, 0), count)
        for name in {name for name, device in most if device is None}:
            if any(other == name and device is not None for other, device in most):
                raise InvalidArgument(
                    f'Resource "{name}" is present as both global and device-specific resource in the model '
                    "configuration."
                )
        self._available = {key: self._amount(key, count) for key, count in most.items()}

    def _all_needs(self) -> Iterable[ResourceNeeds]:
        return (needs for of_model in self._needs_by_owner.values() for needs in of_model)

    def _amount(self, key: ResourceKey, needed: int) -> int:
        if not self._limits:
            return needed
        name, device = key
        counts = [
            limit.count
            for limit in self._limits
            if limit.name == name and (device is None or limit.device in (None, device))
        ]
        amount = max(counts, default=0)
        if amount < needed:
            raise InvalidArgument(
                f'Resource count for "{name}" is limited to {amount} which will prevent scheduling of one or more '
                f"model instances, the minimum required count is {needed}"
            )
        return amount


class _State(Enum):
    IDLE = auto()
    WAITING = auto()
    GRANTED = auto()  # holds its resources, but has not started
    EXECUTING = auto()


@dataclass(slots=True, eq=False)
class _Instance:
    needs: ResourceNeeds
    priority: int
    turn: int = 0
    state: _State = _State.IDLE

    @property
    def next_turn(self) -> int:
        """Return the turn after the next execution."""
        return self.turn + self.priority


class RateLimiter:
    """The rate limiter of a core, for all its models. Used on the core's loop; event-driven."""

    def __init__(self, limits: tuple[ResourceLimit, ...] = ()) -> None:
        self._resources = Resources(limits)
        self._waiting: dict[_Instance, LimitedInstances] = {}  # in order of request
        # Models whose executions have ended since the last grants, in this order.
        self._released: dict[LimitedInstances, None] = {}
        self._turn = 0
        self._dispatcher = Dispatcher(self._grant)

    def register(self, config: Any) -> LimitedInstances | None:
        """Register a model before it is loaded; None if its instances need no resources.

        Raises `InvalidArgument` if its needs exceed the total amounts.
        """
        specs = [spec for spec in instances_of(config) if not spec.passive]
        instances = [_Instance(needs_of(spec), max(spec.group.rate_limiter.priority, 1)) for spec in specs]
        if not any(instance.needs for instance in instances):
            return None
        limited = LimitedInstances(self, instances)
        self._resources.register(limited, [instance.needs for instance in instances])
        self._dispatcher.wake()  # the model may have increased the amounts
        return limited

    def _grant(self) -> None:
        # The models whose executions have ended come first if they have more requests. Otherwise a waiting instance
        # would always be next, whatever its turn.
        released, self._released = self._released, {}
        for owner in released:
            owner.on_release()
        kept: set[ResourceKey] = set()
        for instance in sorted(self._waiting, key=lambda instance: (instance.next_turn, instance.priority)):
            if kept.isdisjoint(instance.needs) and self._resources.fits(instance.needs):
                self._resources.acquire(instance.needs)
                instance.state = _State.GRANTED
                self._waiting.pop(instance).on_grant()
            else:
                kept.update(instance.needs)

    # -- for LimitedInstances ---------------------------------------------------------------------------------

    def _enqueue(self, instance: _Instance, owner: LimitedInstances) -> None:
        instance.turn = max(instance.turn, self._turn)
        instance.state = _State.WAITING
        self._waiting[instance] = owner
        self._dispatcher.wake()

    def _begin(self, instance: _Instance) -> None:
        self._turn = max(self._turn, instance.turn)
        instance.turn = instance.next_turn
        instance.state = _State.EXECUTING

    def _end(self, instance: _Instance, owner: LimitedInstances) -> None:
        """End an execution, or the wait for an execution."""
        if instance.state is _State.WAITING:
            del self._waiting[instance]
        elif instance.state is not _State.IDLE:
            self._resources.release(instance.needs)
        if instance.state is _State.EXECUTING:
            self._released[owner] = None
        instance.state = _State.IDLE
        self._dispatcher.wake()  # this also removes its reservation

    def _remove(self, owner: LimitedInstances) -> None:
        self._resources.remove(owner)
        self._released.pop(owner, None)
        self._dispatcher.wake()


class LimitedInstances:
    """The instances of one model, by index, used by the scheduler of the model.

    `on_grant` is called when a requested instance can start; the scheduler then calls `acquire` or `cancel`.
    `on_release` is called after executions have ended, before other instances are granted; the scheduler then calls
    `acquire` for its next execution, if any.
    """

    def __init__(self, limiter: RateLimiter, instances: list[_Instance]) -> None:
        self.on_grant: Callable[[], None] = lambda: None
        self.on_release: Callable[[], None] = lambda: None
        self._limiter = limiter
        self._instances = instances

    def acquire(self, number: int) -> bool:
        """Start an execution on an idle instance; False if it has to wait for `on_grant`."""
        instance = self._instances[number]
        if instance.state is _State.GRANTED or not instance.needs:
            self._limiter._begin(instance)
            return True
        if instance.state is _State.IDLE:
            self._limiter._enqueue(instance, self)
        return False

    def acquire_any(self) -> int | None:
        """Start an execution on any idle instance and return its index; None if it has to wait for `on_grant`."""
        idle = [n for n, instance in enumerate(self._instances) if instance.state is not _State.EXECUTING]
        idle.sort(key=lambda number: self._instances[number].state is not _State.GRANTED)
        return next((number for number in idle if self.acquire(number)), None)

    def cancel(self, number: int) -> None:
        """Cancel the request for this instance."""
        if self._instances[number].state in (_State.WAITING, _State.GRANTED):
            self._limiter._end(self._instances[number], self)

    def cancel_all(self) -> None:
        """Cancel all requests for instances."""
        for number in range(len(self._instances)):
            self.cancel(number)

    def release(self, number: int) -> None:
        """End an execution."""
        if self._instances[number].state is _State.EXECUTING:
            self._limiter._end(self._instances[number], self)

    def close(self) -> None:
        """Release all resources when the model is unloaded. Idempotent."""
        for instance in self._instances:
            if instance.state is not _State.IDLE:
                self._limiter._end(instance, self)
        self._limiter._remove(self)
