"""Cost of the work queue per request: from the front end through the queue to a worker process and back.

The worker has no engine: it answers each grant with one token. The baseline is a message that the same two processes
send to each other through the same kind of socket. Prints the median and 99th percentile of a single request, and
requests per second with 64 in flight.

usage: python bench/work_queue.py [--requests 5000]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable

import msgspec
import zmq
import zmq.asyncio
from smoke import parse_arguments

from neso.cluster.front_end import ClusterChannel
from neso.cluster.messages import (
    PROTOCOL_VERSION,
    Credits,
    Frame,
    Grant,
    Hello,
    Report,
    to_worker,
)
from neso.cluster.sockets import FrontEndSocket, WorkerSocket
from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import Add, EngineInfo, StepOutputs
from neso.generation import SamplingParams
from neso.generation.output import FinishReason

INFO = EngineInfo("none", 4096, 256, 32000, 4096, 16, 0, 0.0)
PROMPT = [*range(200)]  # about 1 KB
IN_FLIGHT = 64


def worker(address: str) -> None:
    """Answer each grant with a token."""

    async def serve() -> None:
        socket = WorkerSocket("worker", address, None)
        socket.send(
            Hello(
                version=PROTOCOL_VERSION,
                name="worker",
                host="",
                pid=0,
                model="",
                info=INFO,
                roles=frozenset({"prefill", "decode"}),
            )
        )
        grants = 0
        while True:
            message = to_worker.decode(await socket.receive())
            frames = []
            if isinstance(message, Grant):
                grants += 1
                request = msgspec.msgpack.decode(message.request, type=EngineRequest)
                output = SequenceOutput(
                    request_id=request.request_id, index=0, token_ids=[1], finish_reason=FinishReason.LENGTH
                )
                frames.append(Frame(message.attempt, 0, output))
            socket.send(Report(Credits(256, 4096, 1 << 20, grants), EngineStats(num_blocks=4096), frames))

    asyncio.run(serve())


def echo(address: str) -> None:
    """Send each message back."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    socket.send(b"")
    while True:
        socket.send(socket.recv())


async def measure(call: Callable[[int], Awaitable[None]], requests: int) -> tuple[float, float, float]:
    """Return p50 and p99 of one call at a time in microseconds, and calls per second with several in flight."""
    latencies = []
    for number in range(requests):
        started = time.perf_counter()
        await call(number)
        latencies.append((time.perf_counter() - started) * 1e6)
    numbers = iter(range(requests, 3 * requests))

    async def caller() -> None:
        for number in numbers:
            await call(number)

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
    rate = 2 * requests / (time.perf_counter() - started)
    return statistics.median(latencies), statistics.quantiles(latencies, n=100)[98], rate


async def through_queue(directory: str, requests: int) -> tuple[float, float, float]:
    socket = FrontEndSocket()
    address = socket.listen(f"ipc://{directory}/queue")
    channel = ClusterChannel(EngineConfig(model=""), "", [socket])
    process = multiprocessing.get_context("spawn").Process(target=worker, args=(address,), daemon=True)
    process.start()
    await channel.connections.first_worker()
    waiting: dict[str, asyncio.Future[None]] = {}

    async def deliver() -> None:
        while True:
            event = await channel.receive()
            for output in event.outputs if isinstance(event, StepOutputs) else ():
                waiting.pop(output.request_id).set_result(None)

    async def call(number: int) -> None:
        name = str(number)
        waiting[name] = asyncio.get_running_loop().create_future()
        request = EngineRequest(
            request_id=name, prompt_token_ids=PROMPT, sampling=SamplingParams(), max_tokens=1
        )
        channel.send(Add(request))
        await asyncio.shield(waiting[name]) if name in waiting else None

    reader = asyncio.create_task(deliver())
    try:
        return await measure(call, requests)
    finally:
        reader.cancel()
        process.kill()
        await channel.close(0)


async def through_sockets(directory: str, requests: int) -> tuple[float, float, float]:
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    address = f"ipc://{directory}/echo"
    socket.bind(address)
    process = multiprocessing.get_context("spawn").Process(target=echo, args=(address,), daemon=True)
    process.start()
    name, _ = await socket.recv_multipart()
    message = msgspec.msgpack.encode(PROMPT)

    async def call(number: int) -> None:
        await socket.send_multipart([name, message])
        await socket.recv_multipart()

    try:
        return await measure(call, requests)
    finally:
        process.kill()
        socket.close(linger=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000, help="requests in a row")
    arguments = parse_arguments(parser, requests=100)
    with tempfile.TemporaryDirectory() as directory:
        sockets = asyncio.run(through_sockets(directory, arguments.requests))
        queue = asyncio.run(through_queue(directory, arguments.requests))
    print(f"{'':<16}{'p50 us':>10}{'p99 us':>10}{'per s':>10}")
    for title, (median, high, rate) in (("message and back", sockets), ("request", queue)):
        print(f"{title:<16}{median:>10.0f}{high:>10.0f}{rate:>10.0f}")
    print(
        f"the queue costs {queue[0] - sockets[0]:.0f} us per request, {queue[0] / sockets[0]:.1f} times a message"
    )


if __name__ == "__main__":
    main()
