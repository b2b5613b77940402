"""Lists of words as tensors."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from neso.server.errors import InvalidArgument

Words = tuple[tuple[int, ...], ...]


def read_words(name: str, array: npt.NDArray[Any]) -> Words:
    """The words in int32[2, N]: the tokens of all in the first row, in the second where each ends, then -1.

    [[5, 7, 9], [1, 3, -1]] is (5,) and (7, 9). Raises `InvalidArgument`.
    """
    if array.ndim != 2 or len(array) != 2:
        raise InvalidArgument(f"{name}: must have the shape [2, -1], got {list(array.shape)}")
    tokens, ends = array.tolist()
    words = []
    start = 0
    for end in ends:
        if end == -1:
            break
        if not start < end <= len(tokens):
            raise InvalidArgument(
                f"{name}: the second row must say where words end, rising, at most {len(tokens)}, and then be -1; "
                f"got {ends}"
            )
        words.append(tuple(tokens[start:end]))
        start = end
    return tuple(words)
