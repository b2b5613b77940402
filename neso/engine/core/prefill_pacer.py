"""Limits prompt tokens in steps that also decode, to keep the time between tokens even."""

from __future__ import annotations

INITIAL_BUDGET = 64
"""Prompt tokens per mixed step before the first measurement."""

MIN_BUDGET = 16
MAX_MIXED_STEPS = 8
"""Mixed steps in a row; the next one decodes only, so that the duration of decoding alone is known."""
_SMOOTHING = 0.3


class PrefillPacer:
    """Limits the duration of steps that decode to `stretch` times the duration of decoding alone.

    If more sequences wait for their first token than decode, the limit grows with their ratio, so that the first
    finished prompt of a burst does not slow down the other prompts.

    A step is modelled as the cost of its decoding sequences plus a cost per prompt token. Both are measured
    continuously, so the budget adapts to the model, the machine, the batch and the context lengths. While prompts
    never run out, a step decodes only now and then: with the duration of an earlier, smaller batch, the cost of more
    decoding sequences would count as that of the prompt tokens, and the budget would stay too small.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._decode_seconds: float | None = None
        self._token_seconds: float | None = None
        self._num_mixed_steps = 0

    def budget(self, num_decoding: int, num_prompts: int) -> int | None:
        """Return the prompt-token budget of a step with `num_decoding` decoding and `num_prompts` prefilling sequences.

        None: only the scheduler's limit applies. Never 0 twice in a row, so prompts proceed even if nothing can decode.
        """
        if not self._stretch or not num_decoding:
            return None
        if self._num_mixed_steps >= MAX_MIXED_STEPS:
            self._num_mixed_steps = 0
            return 0
        urgency = max(1.0, num_prompts / num_decoding)
        if self._decode_seconds is None or self._token_seconds is None:
            return int(INITIAL_BUDGET * urgency)
        spare = (self._stretch - 1) * urgency * self._decode_seconds
        return max(MIN_BUDGET, int(spare / self._token_seconds))

    def observe(self, num_decoding: int, num_prefill_tokens: int, seconds: float) -> None:
        """Record the number of decoding sequences, the number of prompt tokens and the duration of a step."""
        if not num_decoding:
            return
        if not num_prefill_tokens:
            self._num_mixed_steps = 0
            self._decode_seconds = _blend(self._decode_seconds, seconds)
            return
        self._num_mixed_steps += 1
        if self._decode_seconds is not None:
            # Never 0, so that a single wrong measurement does not remove the limit.
            beside = max(seconds - self._decode_seconds, 0.01 * seconds)
            self._token_seconds = _blend(self._token_seconds, beside / num_prefill_tokens)


def _blend(average: float | None, value: float) -> float:
    return value if average is None else average + _SMOOTHING * (value - average)
