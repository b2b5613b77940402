"""What is logged, and how."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from neso.server.errors import InvalidArgument

_SWITCH = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}


class LogFormat(str, Enum):
    """How a line looks. The first two are Triton's."""

    DEFAULT = "default"
    ISO8601 = "ISO8601"
    JSON = "JSON"

    @classmethod
    def parse(cls, text: str) -> LogFormat:
        """By its name. Raises `InvalidArgument`."""
        try:
            return cls(text)
        except ValueError:
            known = ", ".join(format.value for format in cls)
            raise InvalidArgument(f"invalid argument for log_format, got: {text}, expected {known}") from None


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Each kind of message can be switched off; `verbose_level` 0 is no verbose messages, 1 Neso's own, 2 all.

    `file` "" is standard error.
    """

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    format: LogFormat = LogFormat.DEFAULT
    file: str = ""

    @classmethod
    def parse(
        cls,
        *,
        verbose: str | int = 0,
        info: str | bool = True,
        warning: str | bool = True,
        error: str | bool = True,
        format: str = LogFormat.DEFAULT.value,
        file: str = "",
    ) -> LogOptions:
        """From the values of `--log-verbose`, `--log-info` and so on. Raises `InvalidArgument`."""
        text = str(verbose).lower()
        if text in ("true", "false"):
            text = str(int(_SWITCH[text]))
        if not text.isdecimal():
            raise InvalidArgument(f"--log-verbose: expected a level from 0 on, got '{verbose}'")
        return cls(
            _switch("--log-info", info),
            _switch("--log-warning", warning),
            _switch("--log-error", error),
            int(text),
            LogFormat.parse(format),
            file,
        )


def _switch(name: str, value: str | bool) -> bool:
    found = _SWITCH.get(str(value).lower())
    if found is None:
        raise InvalidArgument(f"{name}: expected true or false, got '{value}'")
    return found
