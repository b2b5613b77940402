"""The log's settings in force. There is one log a process, so there is one of these."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from neso.server.errors import InvalidArgument, Unavailable, Unsupported
from neso.server.log.formats import make_formatter
from neso.server.options import LogFormat, LogOptions

OTHERS = ("asyncio", "grpc", "filelock", "urllib3", "httpcore", "httpx", "opentelemetry")
"""Libraries whose messages below a warning come at verbose level 2 only."""

MOST_VERBOSE = 2**31 - 1
"""What the protocols can carry; from 2 on there is no more to tell."""

Values = dict[str, str | int | bool]


class LogSettings:
    """Applies `LogOptions`, by the names of the logging extension.

    Until `install` the log is the application's: changes then concern the level of Neso's messages only.
    """

    def __init__(self, options: LogOptions | None = None) -> None:
        self.options = options or LogOptions()
        self._handler: logging.Handler | None = None

    def install(self) -> None:
        """Write the process's log, in place of what did so far. Raises `Unavailable` if the file cannot be written."""
        file = self.options.file
        try:
            handler = logging.FileHandler(file) if file else logging.StreamHandler(sys.stderr)
        except OSError as error:
            raise Unavailable(f"cannot write the log file '{file}': {error.strerror}") from None
        handler.addFilter(self._passes)
        root = logging.getLogger()
        for old in tuple(root.handlers):
            root.removeHandler(old)
        root.addHandler(handler)
        if self._handler is not None:
            self._handler.close()
        self._handler = handler
        self._apply()

    def settings(self) -> Values:
        """As the logging extension tells them."""
        options = self.options
        return {
            "log_file": options.file,
            "log_info": options.info,
            "log_warning": options.warning,
            "log_error": options.error,
            "log_verbose_level": options.verbose_level,
            "log_format": options.format.value,
        }

    def update(self, values: Mapping[str, Any]) -> None:
        """Change some of them, all or none. The values have the types of `settings`. Raises `ServerError`."""
        changes: dict[str, Any] = {}
        for name, value in values.items():
            field = name.removeprefix("log_")
            if name == "log_file":
                raise Unsupported("log file location can not be updated through network protocol")
            if name not in self.settings():
                known = ", ".join(known for known in self.settings() if known != "log_file")
                raise InvalidArgument(f"unknown log setting '{name}', expected one of {known}")
            if name == "log_verbose_level" and value > MOST_VERBOSE:
                raise InvalidArgument(f"log_verbose_level must be at most {MOST_VERBOSE}, got {value}")
            changes[field] = LogFormat.parse(value) if name == "log_format" else value
        if changes:
            self.options = replace(self.options, **changes)
            self._apply()

    def _apply(self) -> None:
        level = self._level()
        logging.getLogger("neso").setLevel(level)
        if self._handler is None:
            return
        logging.getLogger().setLevel(level)
        for name in OTHERS:
            logging.getLogger(name).setLevel(
                logging.NOTSET if self.options.verbose_level > 1 else logging.WARNING
            )
        self._handler.setFormatter(make_formatter(self.options.format))

    def _level(self) -> int:
        """The lowest level of which anything is written, so that what is not costs nothing."""
        options = self.options
        wanted = (
            (options.verbose_level > 0, logging.DEBUG),
            (options.info, logging.INFO),
            (options.warning, logging.WARNING),
            (options.error, logging.ERROR),
        )
        return next((level for on, level in wanted if on), logging.CRITICAL + 1)

    def _passes(self, record: logging.LogRecord) -> bool:
        options = self.options
        if record.levelno >= logging.ERROR:
            return options.error
        if record.levelno >= logging.WARNING:
            return options.warning
        if record.levelno >= logging.INFO:
            return options.info
        return options.verbose_level > 0


_settings = LogSettings()


def log_settings() -> LogSettings:
    """The settings of this process's log."""
    return _settings


def configure_log(options: LogOptions) -> LogSettings:
    """Let the server write this process's log. Raises `Unavailable` if the file cannot be written."""
    _settings.options = options
    _settings.install()
    return _settings
