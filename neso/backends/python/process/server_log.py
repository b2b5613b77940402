"""The log of a model's process goes to that of the server."""

from __future__ import annotations

import logging
from collections.abc import Callable

from neso.backends.python.process.messages import Log
from neso.server.log.settings import FIELDS


class ServerLog(logging.Handler):
    """The process's side: sends each record, with its traceback as text."""

    def __init__(self, send: Callable[[Log], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            fields = {name: str(getattr(record, name)) for name in FIELDS if hasattr(record, name)}
            name, level = str(record.name), int(record.levelno)
            self._send(Log(name, level, text, record.pathname, record.lineno, fields))
        except Exception:
            self.handleError(record)


def log_level() -> int:
    """The lowest level that the server's log takes of models."""
    return logging.getLogger("neso.model").getEffectiveLevel()


def write(line: Log) -> None:
    """The server's side: as if the line had been logged here."""
    logger = logging.getLogger(line.logger)
    if logger.isEnabledFor(line.level):
        logger.handle(
            logger.makeRecord(
                line.logger, line.level, line.path, line.line, "%s", (line.message,), None, extra=line.fields
            )
        )
