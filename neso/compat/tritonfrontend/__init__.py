"""Triton's package `tritonfrontend` on Neso's front ends."""

from neso import __version__ as __version__
from neso.compat.tritonfrontend.front_ends import KServeGrpc, KServeHttp, Metrics
from neso.server.errors import AlreadyExists as AlreadyExistsError
from neso.server.errors import InternalError, UnknownError
from neso.server.errors import InvalidArgument as InvalidArgumentError
from neso.server.errors import NotFound as NotFoundError
from neso.server.errors import ServerError as TritonError
from neso.server.errors import Unavailable as UnavailableError
from neso.server.errors import Unsupported as UnsupportedError

__all__ = [
    "AlreadyExistsError",
    "InternalError",
    "InvalidArgumentError",
    "KServeGrpc",
    "KServeHttp",
    "Metrics",
    "NotFoundError",
    "TritonError",
    "UnavailableError",
    "UnknownError",
    "UnsupportedError",
]
