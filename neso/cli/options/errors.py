"""What is wrong with the options that were given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from neso.server.errors import ServerError


class OptionError(Exception):
    """The message names the option, and the place in the configuration file where it came from one."""


@contextmanager
def about(flag: str) -> Iterator[None]:
    """A `ServerError` within becomes an `OptionError` about that option."""
    try:
        yield
    except ServerError as error:
        raise OptionError(f"{flag}: {error.message}") from None
