"""Rotary positions on three axes (M-RoPE, arXiv 2409.12191): the tokens of an image have a row and a column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neso.engine.core.step_plan import Int32Array, PlanPart, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class RotaryPlan(PlanPart):
    """Rotary positions of a step that differ from the positions in the sequence, for models with M-RoPE.

    offsets int32[3, T]: for each new token, what its rotary position on the axes time, height and width is above its
    position in the sequence; never positive. A draft token has the offset of the last known token.
    """

    offsets: Int32Array


def rotary_positions(plan: StepPlan, positions: Int32Array) -> Int32Array:
    """Return the rotary positions of tokens at `positions` int32[T]: int32[T], or int32[3, T] if the axes differ."""
    part = plan.part(RotaryPlan)
    if part is None:
        return positions
    offsets = part.offsets[0] if (part.offsets == part.offsets[0]).all() else part.offsets
    return positions + offsets


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """An image in a prompt: rows x columns tokens from position `first` on, row by row."""

    first: int
    rows: int
    columns: int


def position_offsets(grids: list[ImageGrid]) -> Int32Array:
    """Return the offsets of a prompt's tokens, see `RotaryPlan`: int32[3, P + 1] with the last image ending before P.

    The last column is the offset of all further tokens. An image takes max(rows, columns) positions: the token in row r
    and column c is at first + (0, r, c), and the text after it continues there on all axes.
    """
    offset, end = 0, 0
    parts: list[Int32Array] = []
    for grid in grids:
        count = grid.rows * grid.columns
        index = np.arange(count, dtype=np.int32)
        axes = np.stack([np.zeros_like(index), index // grid.columns, index % grid.columns])
        parts += [np.full((3, grid.first - end), offset, np.int32), axes - index + np.int32(offset)]
        offset += max(grid.rows, grid.columns) - count
        end = grid.first + count
    return np.concatenate([*parts, np.full((3, 1), offset, np.int32)], axis=1)
