"""gRPC frontend: the server, and restricted RPCs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from neso.frontends.frontend_options import GrpcOptions
from neso.frontends.kserve.grpc_calls import ActiveCalls
from neso.frontends.kserve.grpc_servicer import register_methods
from neso.frontends.kserve.service import KServeService
from neso.frontends.security import RequiredHeader, Restrictions
from neso.frontends.transport.grpc import GrpcServer
from neso.frontends.transport.tcp import ConnectionLimits
from neso.server.core import Core
from neso.server.errors import Unavailable

# API group of each RPC, by the last part of its path.
GROUPS = {
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


class KServeGrpc:
    """Serves a core over gRPC, on the core's event loop."""

    def __init__(
        self, core: Core, options: GrpcOptions | None = None, limits: ConnectionLimits | None = None
    ) -> None:
        self.options = options or GrpcOptions()
        self._core = core
        self._limits = limits
        self._calls = ActiveCalls()
        self._server: GrpcServer | None = None

    @property
    def port(self) -> int:
        """The port listened on; the configured one before `start`."""
        return self.options.port if self._server is None else self._server.port

    async def start(self) -> None:
        """Listen. Raises `Unavailable` if the address is not available, `InvalidArgument` for invalid TLS files."""
        options = self.options
        interceptors = (RestrictionInterceptor(options.restrictions),) if options.restrictions else ()
        server = GrpcServer(options.server(), interceptors, self._limits)
        calls = ActiveCalls()
        service = KServeService(self._core, options.header_forwarding)
        register_methods(service, calls, server, options.request_limits)
        try:
            await server.start()
        except (OSError, OverflowError) as error:
            raise Unavailable(
                f"cannot listen for gRPC on {self.options.address}: is the port in use? ({error})"
            ) from error
        self._calls = calls
        self._server = server

    async def stop(self, grace: float = 5.0) -> None:
        """Reject new RPCs, wait up to `grace` seconds for RPCs in flight, then end the rest with UNAVAILABLE.

        A stream accepts no more requests and ends after the pending responses. Call before `Core.stop()`.
        """
        server, self._server = self._server, None
        if server is None:
            return
        # An additional second, so that statuses set at the end of the grace period are sent.
        stopped = asyncio.ensure_future(server.stop(grace + 1.0))
        await self._calls.stop(grace)
        await stopped


class RestrictionInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Rejects restricted RPCs without the required metadata with status UNAVAILABLE, as Triton does."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        group = GROUPS.get(details.method.rsplit("/", 1)[-1])
        required = self._restrictions.get(group) if group is not None else None
        if handler is None or required is None or _allows(required, details.invocation_metadata):
            return handler
        return _reject(handler, f"This protocol is restricted, expecting header '{required.name}'")


def _allows(required: RequiredHeader, metadata: Any) -> bool:
    values = [value for key, value in metadata or () if key == required.name]
    if len(values) != 1:
        return False
    return required.matches(values[0].encode() if isinstance(values[0], str) else values[0])


def _reject(handler: Any, message: str) -> Any:
    """Return a handler of the same kind that ends the RPC with UNAVAILABLE."""

    async def reject(request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, message)

    kind = (handler.request_streaming, handler.response_streaming)
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[kind]
    return make(reject)  # without a deserializer: the request is not read
