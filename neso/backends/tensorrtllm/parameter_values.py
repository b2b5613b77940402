"""How the texts in a model's `parameters` are read. Each function raises `ValueError` that says what it expects."""

from __future__ import annotations

import json
from collections.abc import Callable

Read = Callable[[str], object]
Paths = list[list[int]]


def is_unset(text: str) -> bool:
    """Whether a parameter says nothing: it is empty, or a placeholder of the template that nobody has filled."""
    return not text or (text.startswith("${") and text.endswith("}"))


def text(value: str) -> str:
    return value


def boolean(value: str) -> bool:
    if value.lower() in ("true", "1", "yes", "on"):
        return True
    if value.lower() in ("false", "0", "no", "off"):
        return False
    raise ValueError("true or false")


def integer(low: int) -> Read:
    """A whole number, at least `low`."""

    def read(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = low - 1
        if number < low:
            raise ValueError(f"an integer, at least {low}")
        return number

    return read


def fraction(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number <= 1:
        raise ValueError("a number above 0 and at most 1")
    return number


def one_of(*choices: str) -> Read:
    """One of some words; how they are spelled in the list is what they become."""
    by_lower = {choice.lower(): choice for choice in choices}

    def read(value: str) -> str:
        if value.lower() not in by_lower:
            raise ValueError(f"one of {', '.join(choices)}")
        return by_lower[value.lower()]

    return read


def integers(value: str) -> list[int]:
    """Separated by commas."""
    try:
        return [int(part) for part in value.split(",") if part.strip()]
    except ValueError:
        raise ValueError("integers, separated by commas") from None


def window_sizes(value: str) -> int | list[int]:
    """One number for all layers, or one for each."""
    sizes = integers(value)
    if not sizes or min(sizes) < 1:
        raise ValueError("an integer, at least 1, or several for the layers, separated by commas")
    return sizes if len(sizes) > 1 else sizes[0]


def choices(value: str) -> Paths:
    """A tree of guesses as TensorRT-LLM writes it: `{0}, {0, 0}, {0, 1}`."""
    try:
        paths = json.loads("[" + value.replace("{", "[").replace("}", "]") + "]")
    except ValueError:
        paths = None
    if not paths or not all(isinstance(path, list) and path for path in paths):
        raise ValueError('paths of ranks, like "{0}, {0, 0}, {1}"')
    if not all(type(rank) is int for path in paths for rank in path):
        raise ValueError('paths of ranks, like "{0}, {0, 0}, {1}"')
    result: Paths = paths
    return result
