"""A PyTorch program, however it was saved: what it takes, and a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Value = Any
"""A `torch.Tensor`, or a list of `str`."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An input. `takes_strings`: a list of them, not a tensor. `required`: without a default value."""

    name: str
    takes_strings: bool = False
    required: bool = True


class Program(ABC):
    """`arguments` in the order of the call; None for a program that takes one dictionary, of any names.

    `writes_inputs`: it has operations in place, which might change the tensors that it is given.
    """

    arguments: list[Argument] | None
    writes_inputs: bool

    @abstractmethod
    def __call__(self, values: Mapping[str, Value]) -> list[Value] | dict[str, Value]:
        """Run with values by argument (or by key of the dictionary): results in order, or by name."""


def flatten(result: Any) -> list[Value]:
    """The results of a call, in order: a tensor, a list of strings, or a tuple or list of those."""
    if isinstance(result, tuple):
        return [value for element in result for value in flatten(element)]
    if isinstance(result, list) and not all(isinstance(element, str) for element in result):
        return [value for element in result for value in flatten(element)]
    return [result]
