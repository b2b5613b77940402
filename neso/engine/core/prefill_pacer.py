"""Limits prompt tokens in steps that also decode, to keep the time between tokens even."""

from __future__ import annotations

INITIAL_BUDGET = 64
"""Prompt tokens per mixed step before the first measurement."""

MIN_BUDGET = 16
_SMOOTHING = 0.2


class PrefillPacer:
    """Limits the duration of steps that decode to `stretch` times the duration of decoding alone.

    If more sequences wait for their first token than decode, the limit grows with their ratio, so that the first
    finished prompt of a burst does not slow down the other prompts.

    A step is modelled as the cost of its decoding sequences plus a cost per prompt token. Both are measured
    continuously, so the budget adapts to the model, the machine, the batch and the context lengths.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._decode_seconds: float | None = None
        self._token_seconds: float | None = None

    def budget(self, num_decoding: int, num_prompts: int) -> int | None:
        """Return the prompt-token budget of a step with `num_decoding` decoding and `num_prompts` prefilling sequences.

        None: only the scheduler's limit applies.
        """
        if not self._stretch or not num_decoding:
            return None
        urgency = max(1.0, num_prompts / num_decoding)
        if self._decode_seconds is None or self._token_seconds is None:
            return int(INITIAL_BUDGET * urgency)
        spare = (self._stretch - 1) * urgency * self._decode_seconds
        return max(MIN_BUDGET, int(spare / self._token_seconds))

    def observe(self, num_decoding: int, num_prefill_tokens: int, seconds: float) -> None:
        """Record the number of decoding sequences, the number of prompt tokens and the duration of a step."""
        if num_decoding and not num_prefill_tokens:
            self._decode_seconds = _blend(self._decode_seconds, seconds)
        elif num_decoding and self._decode_seconds is not None:
            # Never 0, so that a single wrong measurement does not remove the limit.
            beside = max(seconds - self._decode_seconds, 0.01 * seconds)
            self._token_seconds = _blend(self._token_seconds, beside / num_prefill_tokens)


def _blend(average: float | None, value: float) -> float:
    return value if average is None else average + _SMOOTHING * (value - average)
