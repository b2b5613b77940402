"""How much of the prompts a step may take in while other sequences are decoding."""

from __future__ import annotations

INITIAL_BUDGET = 64
"""Prompt tokens beside decoding sequences while nothing is measured yet."""

MIN_BUDGET = 16
_SMOOTHING = 0.2


class PrefillPacer:
    """Keeps steps that decode from being stretched by prompts to more than `stretch` times their length.

    Where more sequences wait for their first token than decode, the stretch grows with their ratio: a burst of
    prompts is not held up by the first of them that is through.

    A step costs about what its decoding sequences cost alone, and so much for each prompt token. Both are measured
    as steps go by, so the budget fits any model and machine, and the batch and contexts of the moment: the time
    between two tokens of a sequence stays even, and prompts take all the rest.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._decode_seconds: float | None = None
        self._token_seconds: float | None = None

    def budget(self, num_decoding: int, num_prompts: int) -> int | None:
        """Prompt tokens for a step, when so many sequences decode and so many are not through their prompts.

        None: no limit but that of the scheduler.
        """
        if not self._stretch or not num_decoding:
            return None
        urgency = max(1.0, num_prompts / num_decoding)
        if self._decode_seconds is None or self._token_seconds is None:
            return int(INITIAL_BUDGET * urgency)
        spare = (self._stretch - 1) * urgency * self._decode_seconds
        return max(MIN_BUDGET, int(spare / self._token_seconds))

    def observe(self, num_decoding: int, num_prefill_tokens: int, seconds: float) -> None:
        """Take note of a step: sequences that got one token, prompt tokens, and how long it took."""
        if num_decoding and not num_prefill_tokens:
            self._decode_seconds = _blend(self._decode_seconds, seconds)
        elif num_decoding and self._decode_seconds is not None:
            # Never nothing: a measurement that is off must not lift the limit.
            beside = max(seconds - self._decode_seconds, 0.01 * seconds)
            self._token_seconds = _blend(self._token_seconds, beside / num_prefill_tokens)


def _blend(average: float | None, value: float) -> float:
    return value if average is None else average + _SMOOTHING * (value - average)
