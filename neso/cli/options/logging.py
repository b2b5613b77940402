"""What the server writes of itself."""

from __future__ import annotations

from neso.cli.options.kinds import BOOLEAN, LEVEL, PATH, choice
from neso.cli.options.option import Option, Topic

LOGGING = Topic(
    "Logging",
    (
        Option("log-verbose", "0: what matters. 1: more, for debugging.", LEVEL, 0),
        Option("log-info", "Write information.", BOOLEAN, True, absent="turning it off"),
        Option("log-warning", "Write warnings.", BOOLEAN, True, absent="turning them off"),
        Option("log-error", "Write errors.", BOOLEAN, True, absent="turning them off"),
        Option(
            "log-format",
            "default: the severity and the time. ISO8601: the time as ISO 8601 has it.",
            choice("default", "ISO8601"),
            "default",
            absent="another format",
        ),
        Option(
            "log-file", "Write to this file.", PATH, default_text="standard error", absent="a file of the log"
        ),
    ),
)
