"""Unary requests per second of the gRPC frontend, compared to the bare transport.

The model is an identity, FP32[16], on an event loop of this process; the client is h2load. The baseline is a method of
the same gRPC server that echoes the message without parsing it; bench/grpc_server.py compares it with grpc.aio.

    apt-get install nghttp2-client          # h2load
    python bench/grpc_infer.py [--seconds 3] [--elements 16] [--connections 1] [--streams 16]
"""

from __future__ import annotations

import argparse
import asyncio
import time

import grpc.aio
import uvloop
from grpc_server import PATH, echo_callback, load
from identity_model import identity_repository
from smoke import parse_arguments, require_command
from tritonclient.grpc import service_pb2

from neso.frontends.frontend_options import GrpcOptions
from neso.frontends.kserve.grpc_frontend import KServeGrpc
from neso.frontends.transport.grpc import CallbackHandler, GrpcServer, GrpcServerOptions
from neso.server.core import Core
from neso.server.options import ServerOptions

INFER = "/inference.GRPCInferenceService/ModelInfer"


def message(elements: int) -> bytes:
    """Serialized request."""
    return service_pb2.ModelInferRequest(
        model_name="identity",
        id="1",
        inputs=[{"name": "INPUT", "datatype": "FP32", "shape": [elements]}],
        outputs=[{"name": "OUTPUT"}],
        raw_input_contents=[bytes(4 * elements)],
    ).SerializeToString()


async def measure(port: int, path: str, data: bytes, options: argparse.Namespace) -> tuple[float, float]:
    """Requests per second, and CPU microseconds of this process per request."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.unary_unary(path)(data)  # raises if the call fails
    await asyncio.to_thread(load, port, path, data, options, 200)
    cpu = time.process_time()
    rate, count = await asyncio.to_thread(load, port, path, data, options)
    return rate, (time.process_time() - cpu) / count * 1e6


async def compare(options: argparse.Namespace) -> None:
    """Print the rates of the frontend and of the baseline."""
    with identity_repository() as repository:
        core = Core(ServerOptions((repository,)))
        await core.start()
        frontend = KServeGrpc(core, GrpcOptions(host="127.0.0.1", port=0))
        await frontend.start()
        echo = GrpcServer(GrpcServerOptions())
        echo.add_registered_method_handlers("bench.Echo", {"Echo": CallbackHandler(echo_callback)})
        await echo.start()
        data = message(options.elements)
        infer, infer_cpu = await measure(frontend.port, INFER, data, options)
        bare, bare_cpu = await measure(echo.port, PATH, data, options)
        print(f"FP32[{options.elements}], server CPU time in µs per request")
        print("  infer/s    echo/s   ratio   infer CPU   echo CPU")
        print(f"{infer:9.0f} {bare:9.0f} {infer / bare:7.2f} {infer_cpu:11.1f} {bare_cpu:10.1f}")
        await frontend.stop(0)
        await echo.stop(0)
        await core.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--elements", type=int, default=16)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16, help="at a time on each connection")
    options = parse_arguments(parser, seconds=1)
    require_command("h2load", "nghttp2-client")
    uvloop.run(compare(options))


if __name__ == "__main__":
    main()
