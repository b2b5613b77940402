"""How many unary requests a second the gRPC front end serves, and how near that is to what gRPC itself can do.

An identity model, FP32[16], in the server's own process; the client is a process of its own. The baseline is a
bare grpc.aio method that gives the same message back unread.

    python bench/grpc_infer.py [--seconds 3] [--elements 16] [--concurrency 1 16]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import grpc.aio
import uvloop
from tritonclient.grpc import service_pb2

from neso.frontends.kserve_grpc import GrpcOptions, KServeGrpc
from neso.server.backend import BUILTIN, Backend
from neso.server.core import Core
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.options import ServerOptions
from neso.server.tensor import Tensor

CONFIG = """
backend: "bench_identity"
input { name: "INPUT" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUTPUT" data_type: TYPE_FP32 dims: [-1] }
"""
INFER = "/inference.GRPCInferenceService/ModelInfer"
ECHO = "/bench.Echo/Echo"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Identity(Backend):
    """Gives the input back."""

    async def load(self) -> None:
        pass

    async def unload(self) -> None:
        pass

    def submit(self, request: ResponseStream) -> None:
        tensor = request.request.inputs["INPUT"]
        output = Tensor("OUTPUT", tensor.datatype, tensor.array)
        request.send(InferenceResponse("identity", "1", outputs=[output]), final=True)


def message(elements: int) -> bytes:
    """The request, as bytes."""
    return service_pb2.ModelInferRequest(
        model_name="identity",
        id="1",
        inputs=[{"name": "INPUT", "datatype": "FP32", "shape": [elements]}],
        outputs=[{"name": "OUTPUT"}],
        raw_input_contents=[bytes(4 * elements)],
    ).SerializeToString()


async def start_echo() -> tuple[grpc.aio.Server, int]:
    """The baseline."""

    async def echo(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return request

    server = grpc.aio.server(options=UNLIMITED)
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_registered_method_handlers("bench.Echo", {"Echo": handler})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def client(port: int, method: str, concurrency: int, seconds: float, elements: int) -> str:
    """Requests a second and in all, each of `concurrency` callers waiting for one answer at a time."""
    payload = message(elements)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED) as channel:
        call = channel.unary_unary(method)
        for _ in range(20):
            await call(payload)
        count = 0
        end = time.perf_counter() + seconds

        async def caller() -> None:
            nonlocal count
            while time.perf_counter() < end:
                await call(payload)
                count += 1

        start = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(concurrency)))
        return f"{count / (time.perf_counter() - start)} {count}"


async def in_a_process(*arguments: object) -> tuple[float, float]:
    """`client`, in a process of its own: its rate, and the CPU time of this process a request, in microseconds."""
    cpu = time.process_time()
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    rate, count = map(float, output.split())
    return rate, (time.process_time() - cpu) / count * 1e6


async def compare(options: argparse.Namespace) -> None:
    """Print the rates of the front end and of the baseline."""
    BUILTIN["bench_identity"] = f"{__name__}:Identity"
    with tempfile.TemporaryDirectory() as repository:
        (Path(repository) / "identity" / "1").mkdir(parents=True)
        (Path(repository) / "identity" / "config.pbtxt").write_text(CONFIG)
        core = Core(ServerOptions((Path(repository),)))
        await core.start()
        front_end = KServeGrpc(core, GrpcOptions(host="127.0.0.1", port=0))
        await front_end.start()
        echo, echo_port = await start_echo()
        print(f"FP32[{options.elements}], server CPU time in µs a request")
        print("concurrency   infer/s    echo/s   ratio   infer CPU   echo CPU")
        for concurrency in options.concurrency:
            rest = (concurrency, options.seconds, options.elements)
            infer, infer_cpu = await in_a_process(front_end.port, INFER, *rest)
            bare, bare_cpu = await in_a_process(echo_port, ECHO, *rest)
            print(
                f"{concurrency:11d} {infer:9.0f} {bare:9.0f} {infer / bare:7.2f} "
                f"{infer_cpu:11.0f} {bare_cpu:10.0f}",
                flush=True,
            )
        await front_end.stop(0)
        await echo.stop(0)
        await core.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--elements", type=int, default=16)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--client", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        port, method, concurrency, seconds, elements = options.client
        print(uvloop.run(client(int(port), method, int(concurrency), float(seconds), int(elements))))
    else:
        uvloop.run(compare(options))


if __name__ == "__main__":
    main()
