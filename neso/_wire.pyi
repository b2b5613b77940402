"""Types of the extension module with fast paths for simple requests and responses, implemented in csrc/wire/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

def parse_plain_request(
    data: bytes, max_head: int, max_body: int
) -> tuple[str, bytes, dict[bytes, bytes], bytes] | None:
    """(method, target, headers by lower-case name, body) if `data` is exactly one simple HTTP/1.1 request.

    None for anything else, valid or not, which is left to the full parser.
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
    | None
):
    """(id, inputs, outputs, binary by default) of a simple infer request in JSON.

    An input is (name, datatype, shape, content); the content is the elements in row-major order, `bytes` objects for
    BYTES, or the int `binary_data_size`. An output is (name, binary). None for anything else, valid or not.
    """

def write_plain_infer(
    id: str,
    model_name: str,
    model_version: str,
    outputs: Sequence[Any],
    binary: dict[str, bool],
    binary_by_default: bool,
) -> tuple[bytes, int] | None:
    """(body, length of its JSON) of a simple infer response without parameters; binary outputs follow the JSON.

    `outputs`: tensors of the server. `binary`: by name, whether an output is binary; `binary_by_default` for others.
    None for text that needs escaping, BYTES, FP16 and BF16 as JSON, NaN and infinite numbers, and outputs of more than
    64 KiB in total.
    """
