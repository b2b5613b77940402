"""Log settings of the process: line formats, levels, and updates at run time."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from neso.server.errors import InvalidArgument, Unavailable, Unsupported
from neso.server.options import LogFormat, LogOptions

if TYPE_CHECKING:
    from neso.server.inference_request import InferenceRequest

FIELDS = ("model", "model_version", "request_id", "trace_id")


class NamedTrace(Protocol):
    """A trace with an id that is written to log lines."""

    @property
    def name(self) -> str: ...


class RequestInFlight(Protocol):
    """A `ResponseStream`, or its counterpart in the process of a Python model."""

    request: InferenceRequest

    @property
    def trace(self) -> NamedTrace | None: ...


def request_fields(stream: RequestInFlight) -> dict[str, str]:
    """Return the `extra` argument for log messages about a request."""
    request = stream.request
    fields = {"model": request.model_name, "model_version": request.model_version, "request_id": request.id}
    if stream.trace is not None:
        fields["trace_id"] = stream.trace.name
    return fields


class TritonFormatter(logging.Formatter):
    """`I1121 13:23:45.123456 PID file.py:LINE] "message"`, in UTC, with the message as a JSON string on one line.

    A stack trace follows on separate lines.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self._head(record)} {record.filename}:{record.lineno}] {_quote(record.getMessage())}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line

    def _head(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%m%d %H:%M:%S", time.gmtime(record.created))
        return f"{_letter(record)}{moment}.{_microseconds(record):06d} {record.process}"


class Iso8601Formatter(TritonFormatter):
    """`2026-11-21T13:23:45Z I PID file.py:LINE] "message"`."""

    def _head(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        return f"{moment} {_letter(record)} {record.process}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line, without unknown fields."""

    def __init__(self) -> None:
        super().__init__()
        # Imported here: processes of Python models import this module in environments without orjson.
        from orjson import dumps

        self._dumps = dumps

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{_microseconds(record):06d}Z",
            "level": record.levelname,
            "logger": record.name,
            "file": record.filename,
            "line": record.lineno,
            "pid": record.process,
            "message": record.getMessage(),
        }
        line |= {name: value for name in FIELDS if (value := getattr(record, name, "")) not in ("", None)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return self._dumps(line, default=str).decode()


def make_formatter(format: LogFormat) -> logging.Formatter:
    """Return the formatter for a log format."""
    return _FORMATTERS[format]()


_FORMATTERS: dict[LogFormat, type[logging.Formatter]] = {
    LogFormat.DEFAULT: TritonFormatter,
    LogFormat.ISO8601: Iso8601Formatter,
    LogFormat.JSON: JsonFormatter,
}


def _letter(record: logging.LogRecord) -> str:
    """Return the level letter: E, W or I. Verbose messages have level I, as in Triton."""
    if record.levelno >= logging.ERROR:
        return "E"
    return "W" if record.levelno >= logging.WARNING else "I"


def _microseconds(record: logging.LogRecord) -> int:
    return int(record.created % 1 * 1_000_000)


def _quote(message: str) -> str:
    """Return the message as a JSON string, or unchanged if TRITON_SERVER_ESCAPE_LOG_MESSAGES is 0."""
    if os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES") == "0":
        return message
    return json.dumps(message, ensure_ascii=False)


QUIET_LIBRARIES = ("asyncio", "grpc", "filelock", "urllib3", "httpcore", "httpx", "opentelemetry")
"""Libraries whose messages below WARNING are logged only at verbose level 2."""

MAX_VERBOSE_LEVEL = 2**31 - 1
"""Maximum verbose level of the protocols; levels above 2 have the same effect as 2."""

Values = dict[str, str | int | bool]


class LogSettings:
    """Applies `LogOptions`, with the names of the logging extension.

    Before `install`, only the level of Neso's loggers is changed, because the application owns the root log handlers.
    """

    def __init__(self, options: LogOptions | None = None) -> None:
        self.options = options or LogOptions()
        self._handler: logging.Handler | None = None

    def install(self) -> None:
        """Replace the root log handlers. Raises `Unavailable` if the file cannot be written."""
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
        """Return the current settings in the format of the logging extension."""
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
        """Update settings atomically. Values have the same types as in `settings`. Raises `ServerError`."""
        changes: dict[str, Any] = {}
        for name, value in values.items():
            field = name.removeprefix("log_")
            if name == "log_file":
                raise Unsupported("log file location can not be updated through network protocol")
            if name not in self.settings():
                known = ", ".join(known for known in self.settings() if known != "log_file")
                raise InvalidArgument(f"unknown log setting '{name}', expected one of {known}")
            if name == "log_verbose_level" and value > MAX_VERBOSE_LEVEL:
                raise InvalidArgument(f"log_verbose_level must be at most {MAX_VERBOSE_LEVEL}, got {value}")
            changes[field] = LogFormat.parse(value) if name == "log_format" else value
        if changes:
            self.options = replace(self.options, **changes)
            self._apply()

    def replace(self, options: LogOptions) -> None:
        """Use other settings for the same log file."""
        self.options = options
        self._apply()

    def _apply(self) -> None:
        level = self._level()
        logging.getLogger("neso").setLevel(level)
        if self._handler is None:
            return
        logging.getLogger().setLevel(level)
        for name in QUIET_LIBRARIES:
            logging.getLogger(name).setLevel(
                logging.NOTSET if self.options.verbose_level > 1 else logging.WARNING
            )
        self._handler.setFormatter(make_formatter(self.options.format))

    def _level(self) -> int:
        """Return the lowest enabled level."""
        options = self.options
        enabled = (
            (options.verbose_level > 0, logging.DEBUG),
            (options.info, logging.INFO),
            (options.warning, logging.WARNING),
            (options.error, logging.ERROR),
        )
        return next((level for on, level in enabled if on), logging.CRITICAL + 1)

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
    """Return the log settings of this process."""
    return _settings


def configure_log(options: LogOptions) -> LogSettings:
    """Install the log handler of the server in this process. Raises `Unavailable` if the file cannot be written."""
    _settings.options = options
    _settings.install()
    return _settings
