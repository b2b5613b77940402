"""Cost of the work queue per request: from the front end through the queue to a worker process and back.

The worker has no engine: it answers each grant with one token. The baseline is a message that the same two processes
send to each other through the same kind of socket. With nats-server in the PATH, the same is measured for a queue in
NATS JetStream, where a message is a request and reply of core NATS. Prints the median and 99th percentile of a single
request, and requests per second with 64 in flight.

usage: python bench/work_queue.py [--requests 5000]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import multiprocessing
import shutil
import socket as socketlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from smoke import parse_arguments

from neso.cluster.front_end import ClusterChannel
from neso.cluster.jetstream.connection import NatsConnection, NatsOptions
from neso.cluster.jetstream.front_end import NatsFrontEndSocket
from neso.cluster.jetstream.ticket_pulls import TicketPulls
from neso.cluster.sockets import FrontEndSocket
from neso.cluster.worker import Worker
from neso.cluster.worker_options import WorkerOptions, checkpoint_digest
from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.channel import EngineChannel
from neso.engine.ipc.messages import Add, Command, EngineInfo, Event, StepOutputs
from neso.generation import SamplingParams
from neso.generation.output import FinishReason

INFO = EngineInfo("none", 4096, 256, 32000, 4096, 16, 0, 0.0)
PROMPT = [*range(200)]  # about 1 KB
IN_FLIGHT = 64


class EchoChannel(EngineChannel):
    """An engine that answers each request with a token."""

    def __init__(self) -> None:
        self.dead = asyncio.get_running_loop().create_future()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def send(self, command: Command) -> None:
        if isinstance(command, Add):
            output = SequenceOutput(
                request_id=command.request.request_id,
                index=0,
                token_ids=[1],
                finish_reason=FinishReason.LENGTH,
            )
            self._events.put_nowait(StepOutputs([output], EngineStats(num_blocks=INFO.num_blocks)))

    async def receive(self) -> Event:
        return await self._events.get()

    async def close(self, timeout: float) -> None:
        pass


class EchoWorker(Worker):
    """A worker without an engine."""

    async def _load(self) -> None:
        self._channel, self._info = EchoChannel(), INFO
        self._stats = EngineStats(num_blocks=INFO.num_blocks)


def worker(address: str | NatsOptions, model: str) -> None:
    """Answer each grant with a token."""
    options = WorkerOptions(config=EngineConfig(model=model), address=address, name="worker")
    asyncio.run(EchoWorker(options).run())


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


async def through_queue(directory: str, requests: int, url: str = "") -> tuple[float, float, float]:
    """Measure a queue in this process, or the one in NATS at a URL."""
    model = f"{directory}/model"
    Path(model).mkdir(exist_ok=True)  # noqa: ASYNC240
    config = EngineConfig(model=model)
    digest = checkpoint_digest(config)
    address: str | NatsOptions
    if url:
        address = NatsOptions(urls=url, queue="bench")
        nats_socket = NatsFrontEndSocket(await NatsConnection.open(address, "bench"), digest)
        pulls = TicketPulls(nats_socket)
        channel = ClusterChannel(config, digest, [nats_socket], pulls)
        await pulls.open()
        await nats_socket.open()
    else:
        socket = FrontEndSocket()
        address = socket.listen(f"ipc://{directory}/queue")
        channel = ClusterChannel(config, digest, [socket])
    process = multiprocessing.get_context("spawn").Process(target=worker, args=(address, model), daemon=True)
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


async def through_nats(url: str, requests: int) -> tuple[float, float, float]:
    """Measure a request and its reply over core NATS."""
    import nats
    import nats.errors

    client = await nats.connect(url)
    process = multiprocessing.get_context("spawn").Process(target=nats_echo, args=(url,), daemon=True)
    process.start()
    message = msgspec.msgpack.encode(PROMPT)

    async def call(number: int) -> None:
        await client.request("bench.echo", message, timeout=60)

    while True:
        try:
            await call(0)
            break
        except nats.errors.NoRespondersError:
            await asyncio.sleep(0.1)
    try:
        return await measure(call, requests)
    finally:
        process.kill()
        await client.close()


def nats_echo(url: str) -> None:
    """Answer each request with its content."""
    import nats

    async def serve() -> None:
        client = await nats.connect(url)

        async def answer(message: Any) -> None:
            await message.respond(message.data)

        await client.subscribe("bench.echo", cb=answer)
        await asyncio.Event().wait()

    asyncio.run(serve())


def start_nats(directory: str) -> tuple[subprocess.Popen[bytes], str] | None:
    """Start nats-server and return its URL; None if it or its client is not installed."""
    if shutil.which("nats-server") is None or importlib.util.find_spec("nats") is None:
        print("nats-server or nats-py is not installed: the queue in NATS is not measured")
        return None
    with socketlib.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["nats-server", "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", f"{directory}/nats"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    for _ in range(300):
        try:
            socketlib.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.1)
    return server, f"nats://127.0.0.1:{port}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000, help="requests in a row")
    arguments = parse_arguments(parser, requests=100)
    with tempfile.TemporaryDirectory() as directory:
        sockets = asyncio.run(through_sockets(directory, arguments.requests))
        queue = asyncio.run(through_queue(directory, arguments.requests))
        results = {"message and back": sockets, "request": queue}
        if started := start_nats(directory):
            server, url = started
            try:
                results["NATS: message and back"] = asyncio.run(through_nats(url, arguments.requests))
                results["NATS: request"] = asyncio.run(through_queue(directory, arguments.requests, url))
            finally:
                server.kill()
                server.wait()
    print(f"{'':<24}{'p50 us':>10}{'p99 us':>10}{'per s':>10}")
    for title, (median, high, rate) in results.items():
        print(f"{title:<24}{median:>10.0f}{high:>10.0f}{rate:>10.0f}")
    print(
        f"the queue costs {queue[0] - sockets[0]:.0f} us per request, {queue[0] / sockets[0]:.1f} times a message"
    )
    if "NATS: request" in results:
        shared, message = results["NATS: request"][0], results["NATS: message and back"][0]
        print(
            f"the queue in NATS costs {shared - message:.0f} us per request, {shared / message:.1f} times a message"
        )


if __name__ == "__main__":
    main()
