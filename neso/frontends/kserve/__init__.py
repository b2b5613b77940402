"""KServe v2 and Triton's extensions: one service (`service.py`) with an HTTP and a gRPC codec.

Modules named `http_*` and `grpc_*` translate between wire formats and the service.
"""
