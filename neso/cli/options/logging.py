"""What the server writes of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neso.cli.options.kinds import BOOLEAN, LEVEL, choice
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

if TYPE_CHECKING:
    from neso.server.log import LogOptions

LOGGING = Topic(
    "Logging",
    (
        Option(
            "log-verbose",
            "0: what matters. 1: more of Neso. 2: all, of libraries too.",
            LEVEL,
            0,
            aliases=("tritonserver-log-verbose-level",),
        ),
        Option("log-info", "Write information.", BOOLEAN, True),
        Option("log-warning", "Write warnings.", BOOLEAN, True),
        Option("log-error", "Write errors.", BOOLEAN, True),
        Option(
            "log-format",
            "default and ISO8601 are Triton's lines; JSON: an object on each line.",
            choice("default", "ISO8601", "JSON"),
            "default",
        ),
        Option("log-file", "Write to this file.", metavar="FILE", default_text="standard error"),
    ),
)


def log_options(values: Values) -> LogOptions:
    """Of the process's log. Raises `ServerError`."""
    from neso.server.log import LogOptions

    return LogOptions.parse(
        verbose=values["log-verbose"],
        info=values["log-info"],
        warning=values["log-warning"],
        error=values["log-error"],
        format=values["log-format"],
        file=values["log-file"] or "",
    )
