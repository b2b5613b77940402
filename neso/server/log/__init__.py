"""The server's log: what is written, in which form, and how that is changed while the server runs."""

from neso.server.log.settings import LogSettings, configure_log, log_settings, request_fields
from neso.server.options import LogFormat, LogOptions

__all__ = [
    "LogFormat",
    "LogOptions",
    "LogSettings",
    "configure_log",
    "log_settings",
    "request_fields",
]
