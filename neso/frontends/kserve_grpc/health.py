"""The standard health service, grpc.health.v1.Health, of which Triton has `Check`.

Its two messages have one field each, so they are written by hand here; a package for them would be one more
dependency.
"""

from __future__ import annotations

import grpc
import grpc.aio

from neso.server.core import Core

# HealthCheckResponse{status = 1}: SERVING is 1, NOT_SERVING is 2.
SERVING = b"\x08\x01"
NOT_SERVING = b"\x08\x02"


def health_handler(core: Core) -> grpc.GenericRpcHandler:
    """`Check`: SERVING while the server lives, whatever service is asked for."""

    async def check(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return SERVING if core.live() else NOT_SERVING

    return grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(check)}
    )
