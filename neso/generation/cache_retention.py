"""How long the key-value cache of a request shall be kept, by TensorRT-LLM's rules."""

from __future__ import annotations

import msgspec

from neso.generation.invalid_parameter import InvalidParameter

DEFAULT_PRIORITY = 35
MAX_PRIORITY = 100
MAX_RANGES = 256


class RetainedRange(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of the prompt from `start` to before `end` (None: to its end) have a priority, for so long or for ever."""

    start: int
    end: int | None = None
    priority: int = DEFAULT_PRIORITY
    duration_ms: int | None = None


class CacheRetention(msgspec.Struct, frozen=True, array_like=True):
    """Cached blocks of a lower priority (0 to 100) are reused first, those of the same in the order of their last use.

    `ranges` are for the prompt, `decode_priority` and `decode_duration_ms` for what is generated. When a duration is
    over, a block has the default priority. Raises `InvalidParameter` by the names of TensorRT-LLM's tensors.
    """

    ranges: list[RetainedRange] = []
    decode_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: int | None = None

    def __post_init__(self) -> None:
        if len(self.ranges) > MAX_RANGES:
            raise InvalidParameter("retention_token_range_starts", f"are more than {MAX_RANGES}")
        for kept in self.ranges:
            if kept.start < 0 or (kept.end is not None and kept.end <= kept.start):
                raise InvalidParameter(
                    "retention_token_range_ends", f"a range from {kept.start} to {kept.end} has no tokens"
                )
            _check("retention_token_range_priorities", kept.priority, MAX_PRIORITY)
            _check("retention_token_range_durations_ms", kept.duration_ms)
        _check("retention_decode_priority", self.decode_priority, MAX_PRIORITY)
        _check("retention_decode_duration_ms", self.decode_duration_ms)

    def of(self, position: int, num_prompt_tokens: int) -> tuple[int, int | None] | None:
        """Priority and duration of a block that begins with the token at `position`; None: as it is."""
        if position >= num_prompt_tokens:
            return self.decode_priority, self.decode_duration_ms
        for kept in self.ranges:
            if kept.start <= position and (kept.end is None or position < kept.end):
                return kept.priority, kept.duration_ms
        return None


def _check(field: str, value: int | None, most: int | None = None) -> None:
    if value is not None and (value < 0 or (most is not None and value > most)):
        raise InvalidParameter(
            field, f"must be at least 0{f' and at most {most}' if most else ''}, got {value}"
        )
