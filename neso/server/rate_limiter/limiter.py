"""Rate limiter: decides which instance executes next among models that share resources."""

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
"""A resource's name and its device; None: it is global."""

Needs = dict[ResourceKey, int]
"""What an instance takes while it executes."""


def needs_of(spec: InstanceSpec) -> Needs:
    """By the `rate_limiter` of the instance's group. Raises `InvalidArgument`."""
    needs: Needs = {}
    for resource in spec.group.rate_limiter.resources:
        if not resource.name:
            raise InvalidArgument(f"a resource of instance group '{spec.group.name}' must have a name")
        if resource.count:
            needs[resource.name, None if getattr(resource, "global") else spec.device] = resource.count
    return needs


class Resources:
    """There is of a resource what the limits say; without any limits, the most that an instance needs.

    With limits, a resource that they do not name is not there.
    """

    def __init__(self, limits: Sequence[ResourceLimit] = ()) -> None:
        self._limits = tuple(limits)
        self._declared: dict[object, list[Needs]] = {}
        self._available: Needs = {}  # what there is of the declared ones, taken or not
        self._taken: Counter[ResourceKey] = Counter()

    def declare(self, owner: object, needs: list[Needs]) -> None:
        """A model comes. Raises `InvalidArgument`, and forgets it, if an instance could never get what it needs."""
        self._declared[owner] = needs
        try:
            self._recount()
        except InvalidArgument:
            self.forget(owner)
            raise

    def forget(self, owner: object) -> None:
        """A model has gone."""
        self._declared.pop(owner, None)
        self._recount()

    def available(self, key: ResourceKey) -> int:
        """How much there is of a resource, taken or not."""
        return self._available.get(key, 0)

    def fit(self, needs: Needs) -> bool:
        """Whether that much is left."""
        return all(self._taken[key] + count <= self.available(key) for key, count in needs.items())

    def take(self, needs: Needs) -> None:
        self._taken.update(needs)

    def give_back(self, needs: Needs) -> None:
        self._taken.subtract(needs)

    def _recount(self) -> None:
        most: Needs = {}
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

    def _all_needs(self) -> Iterable[Needs]:
        return (needs for of_model in self._declared.values() for needs in of_model)

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
    ASKING = auto()
    GRANTED = auto()  # it holds its resources, and has not begun
    EXECUTING = auto()


@dataclass(slots=True, eq=False)
class _Instance:
    needs: Needs
    priority: int
    turn: int = 0
    state: _State = _State.IDLE


class RateLimiter:
    """One for all models of a core. Belongs to the core's event loop; nothing polls."""

    def __init__(self, limits: tuple[ResourceLimit, ...] = ()) -> None:
        self._resources = Resources(limits)
        self._asking: dict[_Instance, LimitedInstances] = {}  # in the order of asking
        self._turn = 0
        self._dispatcher = Dispatcher(self._grant)

    def admit(self, config: Any) -> LimitedInstances | None:
        """A model is about to be loaded; None when none of its instances needs a resource.

        Raises `InvalidArgument` for one that needs more than there is.
        """
        specs = [spec for spec in instances_of(config) if not spec.passive]
        instances = [_Instance(needs_of(spec), max(spec.group.rate_limiter.priority, 1)) for spec in specs]
        if not any(instance.needs for instance in instances):
            return None
        limited = LimitedInstances(self, instances)
        self._resources.declare(limited, [instance.needs for instance in instances])
        self._dispatcher.wake()  # there may be more of a resource now
        return limited

    def _grant(self) -> None:
        kept: set[ResourceKey] = set()
        for instance in sorted(self._asking, key=lambda instance: instance.turn):
            if kept.isdisjoint(instance.needs) and self._resources.fit(instance.needs):
                self._resources.take(instance.needs)
                instance.state = _State.GRANTED
                self._asking.pop(instance).on_grant()
            else:
                kept.update(instance.needs)

    # -- for LimitedInstances ---------------------------------------------------------------------------------

    def _ask(self, instance: _Instance, owner: LimitedInstances) -> None:
        instance.turn = max(instance.turn, self._turn)
        instance.state = _State.ASKING
        self._asking[instance] = owner
        self._dispatcher.wake()

    def _begin(self, instance: _Instance) -> None:
        self._turn = max(self._turn, instance.turn)
        instance.turn += instance.priority
        instance.state = _State.EXECUTING

    def _end(self, instance: _Instance) -> None:
        """Of an execution, or of waiting for one."""
        if instance.state is _State.ASKING:
            del self._asking[instance]
        elif instance.state is not _State.IDLE:
            self._resources.give_back(instance.needs)
        instance.state = _State.IDLE
        self._dispatcher.wake()  # also for those that it kept from what it waited for

    def _forget(self, owner: LimitedInstances) -> None:
        self._resources.forget(owner)
        self._dispatcher.wake()


class LimitedInstances:
    """The instances of one model, by number, as its scheduler sees them.

    `on_grant` is called when an instance that was asked for may begin: the scheduler then takes it, or withdraws.
    """

    def __init__(self, limiter: RateLimiter, instances: list[_Instance]) -> None:
        self.on_grant: Callable[[], None] = lambda: None
        self._limiter = limiter
        self._instances = instances

    def take(self, number: int) -> bool:
        """Begin to execute on an instance that does not; False: not yet, `on_grant` tells when."""
        instance = self._instances[number]
        if instance.state is _State.GRANTED or not instance.needs:
            self._limiter._begin(instance)
            return True
        if instance.state is _State.IDLE:
            self._limiter._ask(instance, self)
        return False

    def take_any(self) -> int | None:
        """Begin to execute on one of those that do not, the number; None: not yet, `on_grant` tells when."""
        idle = [n for n, instance in enumerate(self._instances) if instance.state is not _State.EXECUTING]
        idle.sort(key=lambda number: self._instances[number].state is not _State.GRANTED)
        return next((number for number in idle if self.take(number)), None)

    def withdraw(self, number: int) -> None:
        """There is nothing to execute on this instance after all."""
        if self._instances[number].state in (_State.ASKING, _State.GRANTED):
            self._limiter._end(self._instances[number])

    def withdraw_all(self) -> None:
        """There is nothing to execute beyond what is executing."""
        for number in range(len(self._instances)):
            self.withdraw(number)

    def release(self, number: int) -> None:
        """The execution has ended."""
        if self._instances[number].state is _State.EXECUTING:
            self._limiter._end(self._instances[number])

    def close(self) -> None:
        """The model is unloaded: its resources are free, whatever still runs. Idempotent."""
        for instance in self._instances:
            if instance.state is not _State.IDLE:
                self._limiter._end(instance)
        self._limiter._forget(self)
