"""Limits prompt tokens in steps that also decode, so that the time between tokens stays even."""

from __future__ import annotations

INITIAL_BUDGET = 64
"""Prompt tokens beside decoding sequences before anything is measured."""

MIN_BUDGET = 16
_SMOOTHING = 0.2


class PrefillPacer:
    """Limits the duration of steps that decode to `stretch` times what decoding alone takes.

    If more sequences wait for their first token than decode, the limit grows with their ratio, so that the first
    finished prompt of a burst does not slow down the others.

    A step is modelled as the cost of its decoding sequences plus a cost per prompt token. Both are measured
    continuously, so the budget fits the model, the machine, the batch and the lengths of contexts.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._decode_seconds: float | None = None
        self._token_seconds: float | None = None

    def budget(self, num_decoding: int, num_prompts: int) -> int | None:
        """Prompt tokens for a step in which `num_decoding` sequences decode and `num_prompts` are still prefilling.

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
        """Record a step: decoding sequences, prompt tokens, and its duration."""
        if num_decoding and not num_prefill_tokens:
            self._decode_seconds = _blend(self._decode_seconds, seconds)
        elif num_decoding and self._decode_seconds is not None:
            # Never 0: one wrong measurement must not remove the limit.
            beside = max(seconds - self._decode_seconds, 0.01 * seconds)
            self._token_seconds = _blend(self._token_seconds, beside / num_prefill_tokens)


def _blend(average: float | None, value: float) -> float:
    return value if average is None else average + _SMOOTHING * (value - average)
