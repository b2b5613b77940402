"""The server process."""

from __future__ import annotations

from neso.cli.options.kinds import PATH, number
from neso.cli.options.option import Option, Topic

PROCESS = Topic(
    "Process",
    (
        Option("config", "File of options: YAML with their names as keys. The command line wins.", PATH),
        Option(
            "host",
            "Where HTTP, gRPC, OpenAI's API and the metrics listen, but for those that have an address of their own.",
            default="0.0.0.0",
        ),
        Option("id", "Name of this server, in its metadata.", default="neso", metavar="NAME"),
        Option("exit-timeout-secs", "How long requests in flight may take to end at exit.", number(0), 30),
    ),
)
