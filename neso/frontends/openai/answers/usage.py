"""Token counts of one API request, which may be several generations."""

from __future__ import annotations

from typing import Any

from neso.generation import Usage


class UsageTotals:
    """The newest usage of every generation, and their sum."""

    def __init__(self, generations: int) -> None:
        self._latest: list[Usage | None] = [None] * generations

    def update(self, generation: int, usage: Usage) -> None:
        """Note how far a generation has come."""
        self._latest[generation] = usage

    def as_dict(self, *, count_completion: bool = True) -> dict[str, Any]:
        """OpenAI's usage object."""
        known = [usage for usage in self._latest if usage is not None]
        prompt = sum(usage.prompt_tokens for usage in known)
        completion = sum(usage.completion_tokens for usage in known) if count_completion else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in known)},
        }
