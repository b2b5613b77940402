"""Reads how long cached blocks shall be kept out of tensors."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from neso.generation.request import DEFAULT_PRIORITY, CacheRetention, RetainedRange
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
    given = {
        name: values.reshape(-1).tolist()
        for name, values in zip(RANGES, ranges, strict=True)
        if values is not None
    }
    if not given and decode_priority is None and decode_duration_ms is None:
        return None
    if RANGES[0] not in given and given:
        raise InvalidArgument(f"{next(iter(given))}: needs {RANGES[0]}")
    count = len(given.get(RANGES[0], ()))
    given.setdefault(RANGES[3], [_NONE] * count)
    for name in RANGES:
        if len(given.setdefault(name, [])) != count:
            raise InvalidArgument(f"{name}: must have as many values as {RANGES[0]}, {count}")
    return CacheRetention(
        [
            RetainedRange(start, _value(end), priority, _value(duration))
            for start, end, priority, duration in zip(*(given[name] for name in RANGES), strict=True)
        ],
        DEFAULT_PRIORITY if decode_priority is None else decode_priority,
        _value(decode_duration_ms),
    )


def _value(number: int | None) -> int | None:
    return None if number == _NONE else number
