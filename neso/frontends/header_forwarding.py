"""Headers of a request that reach the model as string parameters."""

from __future__ import annotations

from collections.abc import Iterable

from neso.server.errors import InvalidArgument


class HeaderForwarding:
    """Forwards the headers in whose names a regular expression is found, whatever their case.

    The expression is RE2's, as in Triton: it takes time linear in the name, which clients choose.
    """

    def __init__(self, pattern: str) -> None:
        """Raises `InvalidArgument` for a pattern that is no regular expression of RE2."""
        import re2

        options = re2.Options()
        options.case_sensitive = False
        options.log_errors = False  # it would write to standard error by itself
        try:
            self._search = re2.compile(pattern, options).search
        except re2.error as error:
            reason = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else error
            raise InvalidArgument(f"'{pattern}' is not a regular expression: {reason}") from None

    def parameters(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Those to forward, by their names in lower case."""
        return {name.lower(): value for name, value in headers if self._search(name)}
