"""Puts the middlewares around the application: those that are on, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from neso.frontends.openai.access.authentication import Authentication
from neso.frontends.openai.access.request_ids import RequestIds
from neso.frontends.openai_options import AccessOptions

if TYPE_CHECKING:
    from fastapi import FastAPI

_METHODS = ("GET", "POST", "DELETE")
_EXPOSED = (
    "x-request-id",
    "retry-after",
    *(
        f"x-ratelimit-{name}-{what}"
        for what in ("requests", "tokens")
        for name in ("limit", "remaining", "reset")
    ),
)


def limit_rates(routes: list[Route], options: AccessOptions) -> list[Route]:
    """The same routes, for those who do not ask too much."""
    if not options.quota and options.keys is None:  # keys may have quotas of their own
        return routes
    from neso.frontends.openai.access.rate_limiting import RateLimiting

    limiting = RateLimiting(options.quota)
    for route in routes:
        route.app = limiting.around(route.app)
    return routes


def protect(app: FastAPI, options: AccessOptions) -> None:
    """Add them, from the inside out: what is added last sees a request first."""
    if options.keys is not None:
        app.add_middleware(Authentication, keys=options.keys, open_groups=options.open_groups)
    if options.origins:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.origins,
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )
    app.add_middleware(RequestIds)
