"""Reads how long cached blocks shall be kept out of tensors."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from neso.generation.cache_retention import DEFAULT_PRIORITY, CacheRetention, RetainedRange
from neso.server.errors import InvalidArgument

RANGES = tuple(f"retention_token_range_{what}" for what in ("starts", "ends", "priorities", "durations_ms"))
"""Tensors of one value a range; -1 in the second: to the end of the prompt, in the last: for ever."""
_NONE = -1


def read_retention(
    ranges: list[npt.NDArray[Any] | None], decode_priority: int | None, decode_duration_ms: int | None
) -> CacheRetention | None:
    """`ranges` are the tensors of `RANGES`, None for those that are not there.

    Raises `InvalidArgument`, `InvalidParameter`.
    """
    starts, ends, priorities, durations = (None if r is None else r.reshape(-1).tolist() for r in ranges)
    if starts is None:
        for name, values in zip(RANGES, ranges, strict=True):
            if values is not None:
                raise InvalidArgument(f"{name}: needs {RANGES[0]}")
        if decode_priority is None and decode_duration_ms is None:
            return None
        starts, ends, priorities = [], [], []
    durations = [_NONE] * len(starts) if durations is None else durations
    for name, values in zip(RANGES, (starts, ends, priorities, durations), strict=True):
        if values is None or len(values) != len(starts):
            raise InvalidArgument(f"{name}: must have as many values as {RANGES[0]}, {len(starts)}")
    return CacheRetention(
        [
            RetainedRange(start, _value(end), priority, _value(duration))
            for start, end, priority, duration in zip(starts, ends, priorities, durations, strict=True)
        ],
        DEFAULT_PRIORITY if decode_priority is None else decode_priority,
        decode_duration_ms if decode_duration_ms is None else _value(decode_duration_ms),
    )


def _value(number: int) -> int | None:
    return None if number == _NONE else number
