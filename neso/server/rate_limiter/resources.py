"""How much there is of each resource, and how much of it is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from neso.server.config.instances import InstanceSpec
from neso.server.errors import InvalidArgument
from neso.server.options import ResourceLimit

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
