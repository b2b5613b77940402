"""The KServe v2 protocol over gRPC, with Triton's extensions."""

from neso.frontends.frontend_options import GrpcOptions
from neso.frontends.kserve_grpc.server import KServeGrpc

__all__ = ["GrpcOptions", "KServeGrpc"]
