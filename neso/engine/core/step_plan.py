"""Input of a runner for one step: immutable arrays, so that a step can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

NO_TRANSFERS = np.empty((0, 3), np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class PlanPart:
    """The inputs of a step for one feature: arrays, which become read-only.

    Base class; each add-on that has inputs for the runner defines its own. Runners with the feature read it with
    `StepPlan.part`.
    """

    def __post_init__(self) -> None:
        for entry in fields(self):
            getattr(self, entry.name).flags.writeable = False


P = TypeVar("P", bound=PlanPart)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """A flat batch: the new tokens of all scheduled sequences, concatenated without padding.

    With S sequences, T new tokens, R logits rows (arrays are int32 and read-only):

    - sequence_ids[S]: ids of the sequences, unique over the engine's life.
    - token_ids[T]: the new tokens; those of sequence s are query_start[s]:query_start[s + 1]. The value -1 - r refers
      to the token sampled for row r of the previous step, which may still be running.
    - query_start[S + 1]: from 0 to T; every sequence has at least one new token.
    - num_computed[S]: number of tokens of s whose keys and values are in the cache. The new tokens of s have the
      positions num_computed[s], num_computed[s] + 1, ...
    - block_tables[S, B]: cache blocks of s in order of position, padded with -1. The table also covers the new tokens;
      this step writes their keys and values at block_tables[s, p // block_size], offset p % block_size.
    - block_copies[C, 2]: (source, target) blocks to copy before any keys and values are written (copy-on-write).
    - logits_rows[R]: flat positions in [0, T) whose logits are returned, in this order; a position may repeat.
    - block_transfers[H, 3]: (to host, block, host block) to copy in this order before all other operations: to the host
      if the first element is 1, from the host if it is 0. Only for runners with "host_cache".
    - parts: inputs of the add-ons that the step uses, by class
    """

    step: int
    sequence_ids: Int32Array
    token_ids: Int32Array
    query_start: Int32Array
    num_computed: Int32Array
    block_tables: Int32Array
    block_copies: Int32Array
    logits_rows: Int32Array
    block_transfers: Int32Array = field(default_factory=lambda: NO_TRANSFERS)
    parts: Mapping[type[PlanPart], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            getattr(self, name).flags.writeable = False

    def part(self, kind: type[P]) -> P | None:
        """Return the inputs of an add-on; None if the step does not use it."""
        found: P | None = self.parts.get(kind)
        return found

    def with_part(self, part: PlanPart) -> StepPlan:
        """Return a copy with an add-on's inputs."""
        return replace(self, parts={**self.parts, type(part): part})

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def positions(self) -> Int32Array:
        """Return the position whose cache slot each new token is written to, int32[T]."""
        lengths = np.diff(self.query_start)
        starts = np.repeat(self.num_computed - self.query_start[:-1], lengths)
        return (starts + np.arange(len(self.token_ids), dtype=np.int32)).astype(np.int32)

    def slots(self, block_size: int) -> Int32Array:
        """Return the cache slot (block * block_size + offset) that every new token is written to, int32[T]."""
        positions = self.positions()
        rows = np.repeat(np.arange(self.num_sequences), np.diff(self.query_start))
        return self.block_tables[rows, positions // block_size] * block_size + positions % block_size

    def dump(self, path: Path) -> None:
        """Write the plan to an .npz file for `load`. The arrays of a part are named "CLASS.FIELD"."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        for kind, part in self.parts.items():
            arrays |= {f"{kind.__name__}.{entry.name}": getattr(part, entry.name) for entry in fields(part)}
        np.savez(path, allow_pickle=False, step=self.step, **arrays)

    @classmethod
    def load(cls, path: Path, kinds: Iterable[type[PlanPart]]) -> StepPlan:
        """Read a file written by `dump`. `kinds`: the classes of parts it may have.

        Raises `KeyError` if it has another.
        """
        classes = {kind.__name__: kind for kind in kinds}
        arrays: dict[str, npt.NDArray[Any]] = {}
        parts: dict[type[PlanPart], dict[str, npt.NDArray[Any]]] = {}
        with np.load(path) as saved:
            for name in saved.files:
                kind, _, entry = name.rpartition(".")
                (parts.setdefault(classes[kind], {}) if kind else arrays)[entry] = saved[name]
        step = int(arrays.pop("step"))
        return cls(step, **arrays, parts={kind: kind(**values) for kind, values in parts.items()})


_ARRAYS = tuple(entry.name for entry in fields(StepPlan) if entry.name not in ("step", "parts"))
