"""The id of the request that is being answered."""

from __future__ import annotations

from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""As its client knows it; "" outside of a request."""
