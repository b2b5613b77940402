"""A gRPC server on asyncio, over our HTTP/2.

It takes the method handlers and interceptors of `grpc` and calls them as `grpc.aio` does; what it replaces is the
transport, see docs/decisions.md.
"""

from neso.frontends.grpc.deferred import DeferredCall, DeferredHandler
from neso.frontends.grpc.options import GrpcServerOptions
from neso.frontends.grpc.server import GrpcServer

__all__ = ["DeferredCall", "DeferredHandler", "GrpcServer", "GrpcServerOptions"]
