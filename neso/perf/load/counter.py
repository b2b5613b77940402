"""Numbers of the sessions to start, shared by all workers of a closed loop."""

from __future__ import annotations

from multiprocessing.context import BaseContext
from typing import Any


class SharedCounter:
    """Counts from 0 without gaps or repetitions, over processes. It can be passed to a new process."""

    def __init__(self, context: BaseContext) -> None:
        self._value: Any = context.Value("q", 0)

    def take(self) -> int:
        """Return the next number."""
        with self._value.get_lock():
            number: int = self._value.value
            self._value.value = number + 1
        return number

    def reset(self) -> None:
        """Start again from 0."""
        self._value.value = 0
