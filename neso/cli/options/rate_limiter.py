"""The rate limiter."""

from __future__ import annotations

from neso.cli.options.kinds import choice
from neso.cli.options.option import Option, Topic

RATE_LIMITER = Topic(
    "Rate limiter",
    (
        Option(
            "rate-limit",
            "execution_count: instances wait for the resources that their models name.",
            choice("off", "execution_count"),
            "off",
            absent="the rate limiter",
        ),
        Option(
            "rate-limit-resource",
            "How much of a resource there is.",
            repeated=True,
            metavar="NAME:COUNT[:DEVICE]",
            absent="the rate limiter",
        ),
    ),
)
