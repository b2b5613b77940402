"""RPCs that are answered only with the metadata that their group requires."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from neso.frontends.security import RequiredHeader, Restrictions

# By the last part of the RPC's path.
_GROUPS = {
    "ServerLive": "health",
    "ServerReady": "health",
    "ModelReady": "health",
    "Check": "health",
    "ServerMetadata": "metadata",
    "ModelMetadata": "metadata",
    "ModelInfer": "inference",
    "ModelStreamInfer": "inference",
    "ModelConfig": "model-config",
    "ModelStatistics": "statistics",
    "RepositoryIndex": "model-repository",
    "RepositoryModelLoad": "model-repository",
    "RepositoryModelUnload": "model-repository",
    "SystemSharedMemoryStatus": "shared-memory",
    "SystemSharedMemoryRegister": "shared-memory",
    "SystemSharedMemoryUnregister": "shared-memory",
    "CudaSharedMemoryStatus": "shared-memory",
    "CudaSharedMemoryRegister": "shared-memory",
    "CudaSharedMemoryUnregister": "shared-memory",
    "TraceSetting": "trace",
    "LogSettings": "logging",
}


class RestrictionInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends restricted RPCs without their header with UNAVAILABLE, as Triton does."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        group = _GROUPS.get(details.method.rsplit("/", 1)[-1])
        required = self._restrictions.get(group) if group is not None else None
        if handler is None or required is None or _allows(required, details.invocation_metadata):
            return handler
        return _refusing(handler, f"This protocol is restricted, expecting header '{required.name}'")


def _allows(required: RequiredHeader, metadata: Any) -> bool:
    values = [value for key, value in metadata or () if key == required.name]
    return len(values) == 1 and required.matches(_as_bytes(values[0]))


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _refusing(handler: Any, message: str) -> Any:
    """A handler of the same shape that refuses."""

    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, message)

    shape = (handler.request_streaming, handler.response_streaming)
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[shape]
    return make(refuse)  # without a deserializer: nobody reads the request
