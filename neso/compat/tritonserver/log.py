"""Where Neso's messages go while a server runs, by Triton's options."""

from __future__ import annotations

import logging

from neso.compat.tritonserver.enums import LogFormat
from neso.compat.tritonserver.options import Options
from neso.server.log import LogFormat as NesoFormat
from neso.server.log.settings import make_formatter

_logger = logging.getLogger("neso")


class Log:
    """Writes to `log_file` or standard error what the options ask for, from `open` to `close`; nothing by default."""

    def __init__(self, options: Options) -> None:
        self._level = _level(options)
        self._file = options.log_file
        iso = options.log_format is LogFormat.ISO8601
        self._format = make_formatter(NesoFormat.ISO8601 if iso else NesoFormat.DEFAULT)
        self._handler: logging.Handler | None = None
        self._before = logging.NOTSET

    def open(self) -> None:
        """Raises `OSError` for a file that cannot be written."""
        if self._level is None:
            self._handler = logging.NullHandler()
        else:
            self._handler = logging.FileHandler(self._file) if self._file else logging.StreamHandler()
            self._handler.setLevel(self._level)
            self._handler.setFormatter(self._format)
            self._before = _logger.level
            _logger.setLevel(min(self._level, _logger.getEffectiveLevel()))
        _logger.addHandler(self._handler)

    def close(self) -> None:
        """Idempotent."""
        handler, self._handler = self._handler, None
        if handler is not None:
            _logger.removeHandler(handler)
            handler.close()
            if self._level is not None:
                _logger.setLevel(self._before)


def _level(options: Options) -> int | None:
    """The least serious kind of messages; as in Triton, it brings the more serious ones with it."""
    if options.log_verbose:
        return logging.DEBUG
    if options.log_info:
        return logging.INFO
    if options.log_warn:
        return logging.WARNING
    return logging.ERROR if options.log_error else None
