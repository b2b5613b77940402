"""The load of the server in a response's header, for load balancers: ORCA's `endpoint-load-metrics`."""

from __future__ import annotations

import logging

import orjson

from neso.frontends.transport.http1 import Request
from neso.server.core import Core

LOAD_FORMAT = b"endpoint-load-metrics-format"
"""The request's header that asks for it."""

_HEADER = "endpoint-load-metrics"

logger = logging.getLogger(__name__)


def load_headers(request: Request, core: Core) -> tuple[tuple[str, str], ...]:
    """The header that a request has asked for; none for other requests, and where no model has a key-value cache."""
    wanted = request.headers.get(LOAD_FORMAT)
    if wanted is None:
        return ()
    form = wanted.lower()
    load = core.kv_cache_load() if form in (b"text", b"json") else None
    if load is None:
        logger.debug(
            "no %s header: no model tells the state of its key-value cache, in format %r", _HEADER, wanted
        )
        return ()
    if form == b"json":
        named = {"kv_cache_utilization": load.utilization, "max_token_capacity": load.max_tokens}
        return ((_HEADER, "JSON " + orjson.dumps({"named_metrics": named}).decode()),)
    return (
        (
            _HEADER,
            f"TEXT named_metrics.kv_cache_utilization={load.utilization:.6f}, "
            f"named_metrics.max_token_capacity={load.max_tokens}",
        ),
    )
