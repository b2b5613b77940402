"""gRPC server on asyncio and HTTP/2. Only the transport of `grpc.aio` is replaced; see docs/decisions.md.

It accepts the method handlers and interceptors of `grpc` and calls them like `grpc.aio`.
"""

from neso.frontends.transport.grpc.call import CallbackCall, CallbackHandler
from neso.frontends.transport.grpc.server import GrpcServer, GrpcServerOptions

__all__ = ["CallbackCall", "CallbackHandler", "GrpcServer", "GrpcServerOptions"]
