"""The forms of a line in the log."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

import orjson

from neso.server.options import LogFormat
from neso.server.request_fields import FIELDS


class TritonFormatter(logging.Formatter):
    """`I1121 13:23:45.123456 PID file.py:LINE] "message"`, in UTC; the message as a JSON string, so it is one line.

    A stack trace follows in lines of its own.
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
    """One object a line. Fields that the one who logged did not know are left out."""

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
        return orjson.dumps(line, default=str).decode()


def make_formatter(format: LogFormat) -> logging.Formatter:
    """The formatter of that name."""
    return _FORMATTERS[format]()


_FORMATTERS: dict[LogFormat, type[logging.Formatter]] = {
    LogFormat.DEFAULT: TritonFormatter,
    LogFormat.ISO8601: Iso8601Formatter,
    LogFormat.JSON: JsonFormatter,
}


def _letter(record: logging.LogRecord) -> str:
    """Triton has no letter of its own for verbose messages."""
    if record.levelno >= logging.ERROR:
        return "E"
    return "W" if record.levelno >= logging.WARNING else "I"


def _microseconds(record: logging.LogRecord) -> int:
    return int(record.created % 1 * 1_000_000)


def _quote(message: str) -> str:
    """As a JSON string, unless Triton's variable says that messages are written as they are."""
    if os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES") == "0":
        return message
    return json.dumps(message, ensure_ascii=False)
