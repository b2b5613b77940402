"""The server's log: what is written, in which form, and how that is changed while the server runs."""

from neso.server.log.settings import LogSettings, configure_log, log_settings
from neso.server.options import LogFormat, LogOptions
from neso.server.request_fields import request_fields

__all__ = [
    "LogFormat",
    "LogOptions",
    "LogSettings",
    "configure_log",
    "log_settings",
    "request_fields",
]
