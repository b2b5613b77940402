"""Every parser with its seeds, inputs that showed a defect, and random changes of both."""

from __future__ import annotations

import pytest
from fuzz_profile import fuzz_settings
from fuzz_targets import TARGETS
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("name", TARGETS)
def test_known_inputs(name: str) -> None:
    for data in TARGETS[name].inputs():
        TARGETS[name].run(data)


@st.composite
def changed(draw: st.DrawFn, inputs: list[bytes]) -> bytes:
    """Return one of the inputs with bytes replaced, removed, repeated or inserted."""
    data = bytearray(draw(st.sampled_from(inputs)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 8)))
        data[start:end] = draw(
            st.one_of(
                st.binary(max_size=8),
                st.just(bytes(data[start:end]) * 2),
                st.sampled_from([b"\xff" * 8, bytes(8), b"9" * 20, b"[" * 200, b"-1", b"1e400", b"null"]),
            )
        )
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs(name: str) -> None:
    inputs = TARGETS[name].inputs()

    @fuzz_settings
    @given(changed(inputs))
    def check(data: bytes) -> None:
        TARGETS[name].run(data)

    check()
