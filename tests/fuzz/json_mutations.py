"""Small mutations of JSON documents."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

NAMES = [
    "id", "name", "shape", "datatype", "data", "parameters", "inputs", "outputs", "binary_data_size", "binary_data",
    "binary_data_output", "classification", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size",
    "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "triton_x", "IN", "OUT",
    "config", "file:1/model.py", "unload_dependents", "key", "offset", "byte_size", "", "\x00", "é",
]  # fmt: skip

NUMBERS = st.one_of(
    st.integers(-3, 10),
    st.sampled_from(
        [2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30]
    ),
    st.floats(allow_nan=True, allow_infinity=True),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(NAMES))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=3),
    ),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn, document: Any, *, max_changes: int = 3) -> Any:
    """Return `document` with up to `max_changes` random changes."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(0, max_changes))):
        document = _change(draw, document)
    return document


def _change(draw: st.DrawFn, document: Any) -> Any:
    places = list(_places(document))
    if not places or draw(st.integers(0, 30)) == 0:
        return draw(VALUES)
    container, key = draw(st.sampled_from(places))
    how = draw(st.sampled_from(["replace", "replace", "remove", "add", "number", "copy"]))
    if how == "replace":
        container[key] = draw(VALUES)
    elif how == "number":
        container[key] = draw(NUMBERS)
    elif how == "remove":
        del container[key]
    elif isinstance(container, list):
        container.insert(key, draw(VALUES) if how == "add" else copy.deepcopy(container[key]))
    else:
        name = draw(st.sampled_from(NAMES))
        container[name] = draw(VALUES) if how == "add" else copy.deepcopy(container[key])
    return document


def _places(value: Any) -> Any:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])
