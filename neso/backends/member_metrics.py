"""Metrics of a queue and of the workers that take requests from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from neso.server.metrics.registry import Family, ModelMetrics

Group = TypeVar("Group")
Member = TypeVar("Member")
Reads = Mapping[Family, Callable[[Any], float]]
"""Functions that read a value of a group or a member, by family."""


class MemberMetrics(Generic[Group, Member]):
    """Values of a group and of its present members, read at each scrape.

    - families: values of the group
    - members: returns its members, each with the values of its labels after model and version
    - member_families: returns the values of a member
    """

    def __init__(
        self,
        model: ModelMetrics,
        group: Group,
        families: Reads,
        members: Callable[[], Iterable[tuple[Member, tuple[str, ...]]]],
        member_families: Callable[[Member], Reads],
    ) -> None:
        self._model, self._members, self._member_families = model, members, member_families
        self._unwatch = self._watch(families, group)
        self._unwatch_member: dict[tuple[Member, tuple[str, ...]], list[Callable[[], None]]] = {}
        self.update()

    def _watch(self, families: Reads, source: object, *labels: str) -> list[Callable[[], None]]:
        return [
            self._model.watch(family, partial(read, source), *labels) for family, read in families.items()
        ]

    def update(self) -> None:
        """Add the values of members that have joined or have other labels, and remove those of others."""
        current = set(self._members())
        for key in self._unwatch_member.keys() - current:
            self._remove(key)
        for key in current - self._unwatch_member.keys():
            member, labels = key
            self._unwatch_member[key] = self._watch(self._member_families(member), member, *labels)

    def _remove(self, key: tuple[Member, tuple[str, ...]]) -> None:
        for unwatch in self._unwatch_member.pop(key):
            unwatch()

    def close(self) -> None:
        """Remove the values of an unloaded model."""
        for unwatch in self._unwatch:
            unwatch()
        for key in [*self._unwatch_member]:
            self._remove(key)
