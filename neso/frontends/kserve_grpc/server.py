"""The gRPC server."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from neso.frontends.kserve_grpc.calls import Calls
from neso.frontends.kserve_grpc.health import health_handler
from neso.frontends.kserve_grpc.options import GrpcOptions, ResponseCompression
from neso.frontends.kserve_grpc.restricted import RestrictionInterceptor
from neso.frontends.kserve_grpc.servicer import Servicer, add_to_server
from neso.server.core import Core
from neso.server.errors import Unavailable


class KServeGrpc:
    """Serves a core over gRPC, on the core's event loop."""

    def __init__(self, core: Core, options: GrpcOptions | None = None) -> None:
        self.options = options or GrpcOptions()
        self._core = core
        self._calls = Calls()
        self._server: grpc.aio.Server | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The port it listens on; the options' until it has started."""
        return self._port or self.options.port

    async def start(self) -> None:
        """Listen. Raises `Unavailable` when the address cannot be had, `InvalidArgument` for bad TLS files."""
        options = self.options
        servicer = Servicer(self._core, options.header_forwarding)
        compressed = options.response_compression is not ResponseCompression.none
        server = grpc.aio.server(
            interceptors=[RestrictionInterceptor(options.restrictions)] if options.restrictions else None,
            options=options.channel_arguments(),
            compression=grpc.Compression.Gzip if compressed else grpc.Compression.NoCompression,
        )
        add_to_server(servicer, server)
        server.add_generic_rpc_handlers((health_handler(self._core),))
        try:
            self._port = self._add_port(server)
        except RuntimeError as error:
            raise Unavailable(
                f"cannot listen for gRPC on {self.options.address}: is the port in use? ({error})"
            ) from error
        await server.start()
        self._calls = servicer.calls
        self._server = server

    def _add_port(self, server: grpc.aio.Server) -> int:
        tls = self.options.tls
        if tls is None:
            return int(server.add_insecure_port(self.options.address))
        certificate, key, client_root = tls.contents()
        credentials = grpc.ssl_server_credentials(
            [(key, certificate)], client_root, require_client_auth=client_root is not None
        )
        return int(server.add_secure_port(self.options.address, credentials))

    async def stop(self, grace: float = 5.0) -> None:
        """Refuse new RPCs, let those in flight end for `grace` seconds, end the rest with UNAVAILABLE.

        A stream takes no more requests and ends when those in flight are answered. Call before `Core.stop()`.
        """
        server, self._server = self._server, None
        if server is None:
            return
        # The margin is for those whose status is on its way when the grace is over.
        stopped = asyncio.ensure_future(server.stop(grace + 1.0))
        await self._calls.finish(grace)
        await stopped
