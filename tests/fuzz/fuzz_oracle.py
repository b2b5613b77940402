"""Checks that no response reveals an internal error."""

from __future__ import annotations

import re

# Texts of Python exceptions, which must not reach clients.
PYTHON = re.compile(
    r"Traceback|File \"|\b(?:Key|Type|Value|Attribute|Index|Assertion|Overflow|Recursion|Unicode\w*|Memory|Runtime"
    r"|NotImplemented|ZeroDivision|StopIteration|Name|OS|Buffer|Lookup)Error\b|object has no attribute|NoneType"
)


def check_message(message: str) -> None:
    """Check that an error message is not empty and was written for clients."""
    assert message.strip(), "an error without a message"
    assert not PYTHON.search(message), message
