"""Triton's front ends: Neso's, with Triton's options."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from neso.compat.tritonfrontend.options import (
    CompressionLevel,
    KServeGrpcOptions,
    KServeHttpOptions,
    MetricsHttpOptions,
)
from neso.compat.tritonserver.server import Server
from neso.frontends import inprocess
from neso.frontends.transport.http1 import BindError
from neso.server.errors import InvalidArgument, Unavailable

Self = TypeVar("Self", bound="FrontEnd")


class FrontEnd:
    """Serves a `tritonserver.Server` to clients, from `start` to `stop` or in a `with` block.

    Raises `InvalidArgumentError` for a server that does not run and for options of another class.
    """

    Options: ClassVar[Any]
    _kind: ClassVar[type[inprocess.InProcessFrontEnd[Any]]]

    def __init__(self, server: Server, options: Any = None) -> None:
        if options is None:
            options = self.Options()
        if not isinstance(options, self.Options):
            raise InvalidArgument(
                f"Incorrect type for options. options argument must be of type {type(self).__name__}.Options"
            )
        self._front_end = self._kind(server.neso, options.to_neso())

    def start(self) -> None:
        """Listen. Raises `AlreadyExistsError` if it does already, `UnavailableError` when the port is in use."""
        try:
            self._front_end.start()
        except BindError as error:
            raise Unavailable(str(error)) from None

    def stop(self) -> None:
        """Let requests in flight end, then close. Idempotent."""
        self._front_end.stop()

    def __enter__(self: Self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class KServeHttp(FrontEnd):
    """KServe v2 and Triton's extensions over HTTP."""

    Options = KServeHttpOptions
    _kind = inprocess.KServeHttp


class KServeGrpc(FrontEnd):
    """The same over gRPC."""

    Options = KServeGrpcOptions
    Grpc_compression_level = CompressionLevel
    _kind = inprocess.KServeGrpc


class Metrics(FrontEnd):
    """Prometheus metrics over HTTP."""

    Options = MetricsHttpOptions
    _kind = inprocess.Metrics


KServeHttp.Server = KServeHttp  # type: ignore[attr-defined]  # the name of the first release
KServeGrpc.Server = KServeGrpc  # type: ignore[attr-defined]
