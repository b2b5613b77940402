"""The rate limiter."""

from __future__ import annotations

from typing import Any

from neso.cli.options.kinds import choice
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

RATE_LIMITER = Topic(
    "Rate limiter",
    (
        Option(
            "rate-limit",
            "execution_count: instances wait for the resources that their models name.",
            choice("off", "execution_count"),
            "off",
        ),
        Option(
            "rate-limit-resource",
            "How much of a resource there is.",
            repeated=True,
            metavar="NAME:COUNT[:DEVICE]",
        ),
    ),
)


def rate_limiter_options(values: Values) -> dict[str, Any]:
    """Fields of `ServerOptions`. Raises `ServerError`."""
    from neso.server.rate_limiter.options import RateLimitMode, ResourceLimit

    return {
        "rate_limit": RateLimitMode(values["rate-limit"]),
        "rate_limit_resources": tuple(map(ResourceLimit.parse, values["rate-limit-resource"])),
    }
