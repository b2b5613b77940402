"""Limits on the parts of an infer request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """`values`: JSON values that only Python can parse, or fields and elements of a protobuf message.

    `members`: inputs, outputs and parameters, over HTTP of each. `strings`: elements of a BYTES tensor in the binary
    format.
    """

    values: int = 500_000
    members: int = 10_000
    strings: int = 1_000_000
