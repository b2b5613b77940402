"""What the server writes to its log."""

from __future__ import annotations

from neso.server.log import LogOptions, configure_log


def configure_logging(*, verbose: bool) -> None:
    """The process's log as the command line wants it."""
    configure_log(LogOptions(verbose_level=int(verbose)))
