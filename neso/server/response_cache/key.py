"""What tells requests apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from neso.server.inference_request import ParameterValue
from neso.server.tensor import Tensor

Key = bytes


def request_key(
    scope: Iterable[str],
    inputs: Mapping[str, Tensor],
    requested_outputs: Iterable[str],
    parameters: Mapping[str, ParameterValue],
) -> Key:
    """A hash of all that a response depends on. `scope` tells the models apart; no order matters but its own."""
    digest = hashlib.blake2b(digest_size=32)

    def add(*parts: str | bytes | memoryview) -> None:
        for part in parts:
            data = part.encode() if isinstance(part, str) else part
            # Each length goes before its part: ("ab", "c") and ("a", "bc") must differ.
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)

    for part in scope:
        add("scope", part)
    for name, tensor in sorted(inputs.items()):
        add("input", name, tensor.datatype.value, repr(tensor.shape), _wire(tensor))
    for name in sorted(set(requested_outputs)):
        add("output", name)
    for name, value in sorted(parameters.items()):
        add("parameter", name, type(value).__name__, repr(value))
    return digest.digest()


def _wire(tensor: Tensor) -> bytes | memoryview:
    """The data in the wire format, without a copy where memory holds it in that format."""
    array = tensor.array
    if array.dtype.kind in "biuf" and array.flags.c_contiguous and array.ndim and array.size:
        return array.data.cast("B")
    return tensor.to_wire()
