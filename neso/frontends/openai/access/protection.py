"""Puts the middlewares around the application: those that are on, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neso.frontends.openai.access.authentication import Authentication
from neso.frontends.openai.access.options import AccessOptions
from neso.frontends.openai.access.request_ids import RequestIds

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


def protect(app: FastAPI, options: AccessOptions) -> None:
    """Add them, from the inside out: what is added last sees a request first."""
    if options.quota or options.keys is not None:  # keys may have quotas of their own
        from neso.frontends.openai.access.rate_limiting import RateLimiting

        app.add_middleware(RateLimiting, quota=options.quota)
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
