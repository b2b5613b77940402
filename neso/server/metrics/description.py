"""What there is to know of a metric family before anything is measured."""

from __future__ import annotations

from typing import NamedTuple


class FamilyDescription(NamedTuple):
    """A family as /metrics shows it. `labels` are those that every sample has, without `le` and `quantile`."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
