"""Inference requests off the wire.

Protobuf copies each raw input twice, into the message and out of it. For tensors of megabytes that is most of the
work there is, so those are cut out of the bytes first, and protobuf reads what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from neso.server.errors import InvalidArgument

# A field's tag is its number << 3 | how its length is known.
_RAW_INPUT_CONTENTS = 7 << 3 | 2
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5

_LARGE = 64 * 1024  # below, protobuf is quicker


class InferMessage(NamedTuple):
    """A `ModelInferRequest`. Read its raw inputs from here: `request` need not have them."""

    request: Any
    raw_inputs: Sequence[bytes]


def decode_infer_message(data: bytes) -> InferMessage:
    """Raises `InvalidArgument` for bytes that are no such message."""
    try:
        if len(data) >= _LARGE:
            rest, raw_inputs = _cut_raw_inputs(data)
            return InferMessage(service_pb2.ModelInferRequest.FromString(rest), raw_inputs)
        request = service_pb2.ModelInferRequest.FromString(data)
    except (DecodeError, ValueError, IndexError) as error:
        raise InvalidArgument(f"malformed ModelInferRequest: {error}") from None
    return InferMessage(request, request.raw_input_contents)


def _cut_raw_inputs(data: bytes) -> tuple[bytes, list[bytes]]:
    """The message without its raw inputs, and those. Each is a copy: a view could be unaligned for its type."""
    rest: list[bytes] = []
    raw_inputs: list[bytes] = []
    position = 0
    while position < len(data):
        start = position
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _LENGTH:
            length, position = _varint(data, position)
            end = position + length
        elif kind == _VARINT:
            _, end = _varint(data, position)
        elif kind in (_FIXED64, _FIXED32):
            end = position + (8 if kind == _FIXED64 else 4)
        else:
            raise ValueError(f"no field begins with {tag}")
        if end > len(data):
            raise ValueError("the last field is cut off")
        if tag == _RAW_INPUT_CONTENTS:
            raw_inputs.append(data[position:end])
        else:
            rest.append(data[start:end])
        position = end
    return b"".join(rest), raw_inputs


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at `position`, and where it ends."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
