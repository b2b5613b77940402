"""Devices of the models of a server: GPUs, or parts of the CPUs, by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class DeviceClaims:
    """Devices in use by each loaded model. `owner` identifies a loaded model version, of which there may be two during
    a reload."""

    def __init__(self) -> None:
        self._claims: dict[object, tuple[str, frozenset[int]]] = {}
        self._ranks: set[str] = set()

    def claim(self, owner: object, model: str, devices: Sequence[int]) -> list[str]:
        """Claim these devices; returns the names of other models that use one of them."""
        others = {
            name
            for name, claimed in self._claims.values()
            if name != model and not claimed.isdisjoint(devices)
        }
        self._claims[owner] = model, frozenset(devices)
        return sorted(others)

    def claim_free(self, owner: object, model: str, count: int, total: int) -> list[int]:
        """Claim `count` of the devices 0 to `total` - 1: those that the fewest other models use."""
        used = Counter(
            device for name, claimed in self._claims.values() if name != model for device in claimed
        )
        devices = sorted(sorted(range(total), key=lambda device: used[device])[:count])
        self.claim(owner, model, devices)
        return devices

    def claim_ranks(self, address: str) -> bool:
        """Claim the ranks of a launcher that connect to `address`. False if a model has claimed them before: they end
        with the model."""
        is_new = address not in self._ranks
        self._ranks.add(address)
        return is_new

    def release(self, owner: object) -> None:
        """Release the devices of an unloaded model."""
        self._claims.pop(owner, None)
