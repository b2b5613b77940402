"""The server log: formats, levels, and updates at run time."""

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
