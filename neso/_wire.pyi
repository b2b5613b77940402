"""Types of the extension module with fast paths for common requests and responses (csrc/wire/)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

def parse_plain_request(
    data: bytes, max_head: int, max_body: int
) -> tuple[str, bytes, dict[bytes, bytes], bytes] | None:
    """(method, target, headers by lower-case name, body) of exactly one complete, simple HTTP/1.1 request.

    None for anything else, valid or not; the full parser handles it.
    """

def parse_plain_infer(
    json: bytes | memoryview,
) -> (
    tuple[
        str,
        list[tuple[str, str, tuple[int, ...], bytearray | list[bytes] | int]],
        list[tuple[str, bool]] | None,
        bool,
    ]
    | tuple[
        str,
        list[tuple[str, str, tuple[int, ...], bytearray | list[bytes] | int]],
        list[tuple[str, bool]] | None,
        bool,
        bytes,
    ]
    | None
):
    """(id, inputs, outputs, binary by default[, others]) of the JSON of an infer request.

    An input is (name, datatype, shape, content). `content`: a bytearray of the elements in row-major order, a list of
    `bytes` for BYTES, or the int `binary_data_size`. An output is (name, binary). `others`, if there are any: JSON of
    an object with those of the members `outputs` and `parameters` that have anything else, to be used instead. None if
    an input has anything else, valid or not.
    """

def count_json(json: bytes | memoryview, stop: int) -> tuple[int, int, int]:
    """(values, strings, arrays and objects) that a parser of the text would create; it may be invalid.

    The values are an upper bound; names of members are strings. Counting stops when there are more than `stop` values
    or strings.
    """

def split_strings(data: bytes | memoryview, count: int) -> tuple[list[bytes], int]:
    """Split a BYTES tensor in the binary format, a uint32 length before each element, into at most `count` elements.

    Returns the complete elements and the position after the last of them.
    """

def write_plain_infer(
    id: str,
    model_name: str,
    model_version: str,
    outputs: Sequence[Any],
    binary: dict[str, bool],
    binary_by_default: bool,
) -> tuple[bytes, int] | None:
    """Body of an infer response without parameters, and the length of its JSON; binary outputs follow the JSON.

    `outputs`: tensors of the server. `binary`: whether an output is binary, by name; `binary_by_default` applies to
    other names. None if unsupported: strings that JSON must escape; BYTES, FP16 and BF16 as JSON; NaN and infinite
    numbers; more than 64 KiB of outputs.
    """

def scan_infer_request(data: bytes, max_messages: int, max_values: int) -> int:
    """Return the number of fields of a `ModelInferRequest`, and of elements of its packed fields.

    Raises `OverflowError` beyond the limits (`max_messages`: nested messages), `ValueError` for malformed messages.
    """

def split_infer_request(data: bytes, max_messages: int, max_values: int) -> tuple[int, bytes, list[bytes]]:
    """Like `scan_infer_request`; also return the message without its raw inputs, and the raw inputs."""

def scan_load_request(data: bytes, max_messages: int, max_values: int) -> None:
    """Check a `RepositoryModelLoadRequest` in the same way."""
