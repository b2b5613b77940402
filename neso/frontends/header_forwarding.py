"""Forwarding of request headers to models as string parameters."""

from __future__ import annotations

from collections.abc import Iterable

from neso.server.errors import InvalidArgument

_RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)


class HeaderForwarding:
    """Forwards headers whose names contain a match of a case-insensitive regular expression.

    The syntax is that of RE2, as in Triton. RE2 matches header names from clients in linear time.
    """

    def __init__(self, pattern: str) -> None:
        """Raises `InvalidArgument` for an invalid pattern."""
        import re2

        options = re2.Options()
        options.case_sensitive = False
        options.log_errors = False  # otherwise RE2 logs to standard error
        try:
            self._search = re2.compile(pattern, options).search
        except re2.error as error:
            reason = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else error
            raise InvalidArgument(f"'{pattern}' is not a regular expression: {reason}") from None

    def parameters(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return the headers to forward, by lower-case name.

        Raises `InvalidArgument` for a header with the name of a parameter that has a meaning in the protocol.
        """
        forwarded = {name.lower(): value for name, value in headers if self._search(name)}
        for name in forwarded:
            if name in _RESERVED or name.startswith("triton_"):
                raise InvalidArgument(
                    f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
                )
        return forwarded
