"""What no client may ever read, whatever it has sent."""

from __future__ import annotations

import re

# Python's own words. A message that names a type of exception was not written for the client.
PYTHON = re.compile(
    r"Traceback|File \"|\b(?:Key|Type|Value|Attribute|Index|Assertion|Overflow|Recursion|Unicode\w*|Memory|Runtime"
    r"|NotImplemented|ZeroDivision|StopIteration|Name|OS|Buffer|Lookup)Error\b|object has no attribute|NoneType"
)


def check_message(message: str) -> None:
    """An error for a client: says something, in the protocol's words."""
    assert message.strip(), "an error without a message"
    assert not PYTHON.search(message), message
