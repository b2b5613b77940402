"""`pb_utils.Logger`: models write to the server's log."""

from __future__ import annotations

import logging
from enum import IntEnum
from pathlib import Path

from neso.backends.python.model_module import known_folder

_log = logging.getLogger("neso.model")


class LogLevel(IntEnum):
    """How much a message matters."""

    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR
    VERBOSE = logging.DEBUG


class Logger:
    """The log; all methods are static, as models call them on the class."""

    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: int = LogLevel.INFO) -> None:
        _say(level, message)

    @staticmethod
    def log_info(message: str) -> None:
        _say(LogLevel.INFO, message)

    @staticmethod
    def log_warn(message: str) -> None:
        _say(LogLevel.WARNING, message)

    @staticmethod
    def log_error(message: str) -> None:
        _say(LogLevel.ERROR, message)

    @staticmethod
    def log_verbose(message: str) -> None:
        _say(LogLevel.VERBOSE, message)


def _say(level: int, message: str) -> None:
    if not _log.isEnabledFor(level):
        return
    folder = known_folder()
    about = {} if folder is None else {"model": Path(folder).parent.name, "model_version": Path(folder).name}
    _log.log(int(level), "%s", message, stacklevel=3, extra=about)  # by the line of the model that called
