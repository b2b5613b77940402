"""Unary calls per second of the gRPC server, compared to grpc.aio.

    apt-get install nghttp2-client          # h2load, the client
    python bench/grpc_server.py [--connections 4] [--streams 16] [--seconds 3] [--size 64]

Each server is a process that echoes a message without parsing it. Prints calls per second, the server's CPU time per
call, and the ratios of both to those of grpc.aio. On a busy machine the CPU time is the more stable figure.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop
from server_process import server_process
from smoke import parse_arguments, require_command

from neso.frontends.transport.grpc import CallbackCall, CallbackHandler, GrpcServer, GrpcServerOptions

KINDS = ("grpc.aio", "neso, coroutine", "neso, callback")
PATH = "/bench.Echo/Echo"


async def echo(message: bytes, context: Any) -> bytes:
    return message


def echo_callback(message: bytes, call: CallbackCall) -> None:
    call.reply(message)


async def start(kind: str, port: int) -> object:
    """Start a server of one kind."""
    coroutine = grpc.unary_unary_rpc_method_handler(echo)
    if kind == "grpc.aio":
        server = grpc.aio.server()
        server.add_registered_method_handlers("bench.Echo", {"Echo": coroutine})
        server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        server = GrpcServer(GrpcServerOptions(port=port))
        handler = CallbackHandler(echo_callback) if kind.endswith("callback") else coroutine
        server.add_registered_method_handlers("bench.Echo", {"Echo": handler})
    await server.start()
    return server


def serve(kind: str, port: int) -> None:
    """Run one server until it is killed."""

    async def forever() -> None:
        server = await start(kind, port)
        await asyncio.Event().wait()
        del server

    uvloop.run(forever())


def measure(kind: str, options: argparse.Namespace) -> tuple[float, float]:
    """Calls per second of a server, and its CPU time per call in microseconds."""
    with server_process(serve, kind) as server:
        wait_until_up(server.port)
        message = bytes(options.size)
        load(server.port, PATH, message, options, calls=500)
        before = server.cpu_seconds()
        rate, calls = load(server.port, PATH, message, options)
        return rate, (server.cpu_seconds() - before) / calls * 1e6


def wait_until_up(port: int) -> None:
    """Wait until the server responds."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        if channel.unary_unary(PATH)(b"echo", wait_for_ready=True, timeout=20) != b"echo":
            raise SystemExit("the server does not return the message")


def load(
    port: int, path: str, message: bytes, options: argparse.Namespace, calls: int = 0
) -> tuple[float, int]:
    """Run h2load for `calls` calls or `options.seconds`; returns calls per second and number of calls."""
    amount = ["-n", str(calls)] if calls else ["-D", str(options.seconds)]
    with tempfile.NamedTemporaryFile() as body:
        Path(body.name).write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
        command = ["h2load", "-t1", "-c", str(options.connections), "-m", str(options.streams), *amount]
        command += ["-H", "content-type: application/grpc", "-H", "te: trailers", "-d", body.name]
        began = time.perf_counter()
        text = subprocess.run(
            [*command, f"http://127.0.0.1:{port}{path}"], capture_output=True, text=True, check=True
        ).stdout
    taken = time.perf_counter() - began
    done = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored", text)
    if done is None or int(done[2]) + int(done[3]) or not int(done[1]):
        raise SystemExit(text)
    succeeded = int(done[1])
    return succeeded / (taken if calls else options.seconds), succeeded


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--streams", type=int, default=16, help="at a time on each connection")
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--size", type=int, default=64, help="bytes of the message")
    options = parse_arguments(parser, seconds=1)
    require_command("h2load", "nghttp2-client")
    print(f"{'':16} {'calls/s':>9}  {'ratio':>6}  {'CPU us':>7}  {'ratio':>6}")
    base_rate = base_cpu = 0.0
    for kind in KINDS:
        rate, cpu = measure(kind, options)
        base_rate, base_cpu = base_rate or rate, base_cpu or cpu
        print(
            f"{kind:16} {rate:9,.0f}  {rate / base_rate:5.2f}x  {cpu:7.1f}  {base_cpu / cpu:5.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
