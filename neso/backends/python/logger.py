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
        _log.log(int(level), "%s", message, stacklevel=2, extra=_about())

    @staticmethod
    def log_info(message: str) -> None:
        _log.info("%s", message, stacklevel=2, extra=_about())

    @staticmethod
    def log_warn(message: str) -> None:
        _log.warning("%s", message, stacklevel=2, extra=_about())

    @staticmethod
    def log_error(message: str) -> None:
        _log.error("%s", message, stacklevel=2, extra=_about())

    @staticmethod
    def log_verbose(message: str) -> None:
        _log.debug("%s", message, stacklevel=2, extra=_about())


def _about() -> dict[str, str]:
    """Which model speaks, in the threads that run it."""
    folder = known_folder()
    return {} if folder is None else {"model": Path(folder).parent.name, "model_version": Path(folder).name}
