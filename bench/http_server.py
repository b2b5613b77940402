"""Requests per second of the HTTP server, compared to uvicorn with a plain ASGI app.

    pip install uvicorn          # not a dependency of the project
    apt-get install wrk
    python bench/http_server.py [--connections 16] [--seconds 3]

Each server is a process that parses a small JSON body and responds with JSON. Prints requests per second, the server's
CPU time per request, and the ratios of both to those of uvicorn. On a busy machine the CPU time is the more stable
figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import orjson
import uvloop
from server_process import server_process
from smoke import parse_arguments, require_command, require_module

from neso.frontends.transport.http1 import AsgiServer, HttpServer, HttpServerOptions, Request, Response

BODY = orjson.dumps({"text_input": "a small prompt", "max_tokens": 16, "stream": False})
LUA = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '%s'
"""


async def echo_async(request: Request) -> Response:
    return Response(orjson.dumps(orjson.loads(request.body)))


def echo_plain(request: Request) -> Response:
    return Response(orjson.dumps(orjson.loads(request.body)))


async def echo_asgi(
    scope: MutableMapping[str, Any],
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
) -> None:
    if scope["type"] != "http":
        return
    message = await receive()
    body = orjson.dumps(orjson.loads(message["body"]))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve(kind: str, port: int) -> None:
    """Run one server until it is killed."""
    if kind == "uvicorn":
        import uvicorn

        uvicorn.run(
            echo_asgi,
            port=port,
            loop="uvloop",
            http="httptools",
            log_level="error",
            access_log=False,
            lifespan="off",
        )
        return
    options = HttpServerOptions(port=port)
    server = {
        "neso": lambda: HttpServer(echo_async, options),
        "neso, plain function": lambda: HttpServer(echo_plain, options),
        "neso, ASGI bridge": lambda: AsgiServer(echo_asgi, options),
    }[kind]()

    async def forever() -> None:
        await server.start()
        await asyncio.Event().wait()

    uvloop.run(forever())


def measure(kind: str, connections: int, seconds: float) -> tuple[float, float]:
    """Requests per second of a server, and its CPU time per request in microseconds."""
    with server_process(serve, kind) as server:
        wait_until_up(server.port)
        load(server.port, connections, 0.5)
        before, start = server.cpu_seconds(), time.perf_counter()
        rate = load(server.port, connections, seconds)
        requests = rate * (time.perf_counter() - start)
        return rate, (server.cpu_seconds() - before) / requests * 1e6


def wait_until_up(port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise SystemExit("the server did not start (uvicorn: pip install uvicorn)")


def load(port: int, connections: int, seconds: float) -> float:
    """Requests per second that wrk reached."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "echo.lua"
        script.write_text(LUA % BODY.decode())
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(script)]
        text = subprocess.run(
            [*command, f"http://127.0.0.1:{port}/"], capture_output=True, text=True, check=True
        ).stdout
    if "Non-2xx" in text:
        raise SystemExit(text)
    found = re.search(r"Requests/sec:\s+([\d.]+)", text)
    assert found is not None, text
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3)
    arguments = parse_arguments(parser, seconds=0.3)
    require_module("uvicorn")
    require_command("wrk", "wrk")
    print(f"{'':22} {'req/s':>9}  {'ratio':>6}  {'CPU us':>7}  {'ratio':>6}")
    base_rate = base_cpu = 0.0
    for kind in ("uvicorn", "neso", "neso, plain function", "neso, ASGI bridge"):
        rate, cpu = measure(kind, arguments.connections, arguments.seconds)
        base_rate, base_cpu = base_rate or rate, base_cpu or cpu
        print(f"{kind:22} {rate:9,.0f}  {rate / base_rate:5.2f}x  {cpu:7.1f}  {base_cpu / cpu:5.2f}x")


if __name__ == "__main__":
    main()
