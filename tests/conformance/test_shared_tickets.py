"""Tickets in a real NATS JetStream, and connections to one that refuses them: servers and workers of this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nkeys
import psutil
import pytest
import trustme
from cluster_server import MODEL, ClusterServer
from eventually import until, wait_until
from server_process import ServerProcess
from shared_workers import Nats, needs_nats, status, worker

from neso.cluster.front_end import ClusterChannel
from neso.cluster.jetstream.connection import NatsConnection, NatsOptions
from neso.cluster.jetstream.front_end import NatsFrontEndSocket
from neso.cluster.jetstream.ticket_pulls import TicketPulls
from neso.cluster.worker import Worker
from neso.cluster.worker_options import WorkerOptions, checkpoint_digest
from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.channel import EngineChannel
from neso.engine.ipc.messages import Abort, Add, Command, EngineInfo, Event, StepOutputs
from neso.generation import SamplingParams
from neso.generation.output import FinishReason

pytestmark = [pytest.mark.slow, needs_nats]

INFO = EngineInfo("none", 4096, 16, 32000, 4096, 16, 0, 0.0)


class HeldChannel(EngineChannel):
    """An engine whose requests run until the test ends them."""

    def __init__(self) -> None:
        self.dead = asyncio.get_running_loop().create_future()
        self.running: list[str] = []
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def send(self, command: Command) -> None:
        if isinstance(command, Add):
            self.running.append(command.request.request_id)
        elif isinstance(command, Abort):
            self.running.remove(command.request_id)

    def finish_one(self) -> None:
        output = SequenceOutput(
            request_id=self.running.pop(0), index=0, token_ids=[1], finish_reason=FinishReason.LENGTH
        )
        self._events.put_nowait(StepOutputs([output], EngineStats(num_blocks=INFO.num_blocks)))

    async def receive(self) -> Event:
        return await self._events.get()

    async def close(self, timeout: float) -> None:
        pass


class HeldWorker(Worker):
    async def _load(self) -> None:
        self._channel, self._info = self.engine, INFO
        self._stats = EngineStats(num_blocks=INFO.num_blocks)

    def __init__(self, options: WorkerOptions) -> None:
        super().__init__(options)
        self.engine = HeldChannel()


class Queue:
    """A server and its queue."""

    def __init__(self, options: NatsOptions, config: EngineConfig, digest: str, connection: NatsConnection):
        self.options, self.config, self.connection = options, config, connection
        socket = NatsFrontEndSocket(connection, digest)
        self.pulls = TicketPulls(socket)
        self.channel = ClusterChannel(config, digest, [socket], self.pulls)
        self.socket = socket
        self.rejected: list[str] = []
        self.ended: list[str] = []
        self._tasks = [asyncio.create_task(self._receive())]

    async def _receive(self) -> None:
        while True:
            event = await self.channel.receive()
            for output in event.outputs if isinstance(event, StepOutputs) else ():
                failed = output.finish_reason is FinishReason.ERROR
                (self.rejected if failed else self.ended).append(output.request_id)

    def put(self, name: str) -> None:
        request = EngineRequest(
            request_id=name, prompt_token_ids=[1, 2, 3], sampling=SamplingParams(), max_tokens=1
        )
        self.channel.send(Add(request))

    def start_worker(self, name: str) -> HeldChannel:
        held = HeldWorker(WorkerOptions(config=self.config, address=self.options, name=name))
        self._tasks.append(asyncio.create_task(held.run()))
        return held.engine

    async def tickets(self) -> int:
        return (await self.connection.jetstream.stream_info(self.connection.stream)).state.messages

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.channel.close(0)


@asynccontextmanager
async def opened(folder: Path, **options: int) -> AsyncIterator[tuple[Queue, Nats]]:
    (folder / "model").mkdir()
    config = EngineConfig(model=str(folder / "model"))
    nats = Nats(folder / "nats")
    nats_options = NatsOptions(urls=nats.url, queue="held", **options)
    try:
        connection = await NatsConnection.open(nats_options, "test")
        queue = Queue(nats_options, config, checkpoint_digest(config), connection)
        await queue.pulls.open()
        await queue.socket.open()
        try:
            yield queue, nats
        finally:
            await queue.close()
    finally:
        nats.process.end()


async def test_each_request_has_a_ticket_until_it_ends(tmp_path: Path):
    """Also if workers that the server does not know claim it: `nats_max_requests` is exact."""
    async with opened(tmp_path, max_requests=12) as (queue, _):
        first = queue.start_worker("one")
        await queue.channel.connections.first_worker()
        for number in range(6):
            queue.put(f"early {number}")
        # The server forgets the worker as if it was silent, so that it must introduce itself again.
        queue.channel.connections.lost("one", "of the test")
        second = queue.start_worker("two")
        for number in range(6):
            queue.put(f"late {number}")
        await until(lambda: len(first.running) + len(second.running) == 12)
        await until(lambda: queue.channel.queue.num_waiting == 0)
        for number in range(3):
            assert await queue.tickets() == 12
            queue.put(f"more {number}")
            await until(lambda number=number: f"more {number}" in queue.rejected)
        for engine in (first, second):
            while engine.running:
                engine.finish_one()
        await until(lambda: len(queue.ended) == 12)
        while await queue.tickets():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def write_config(path: Path, *users: str) -> None:
    """Configure a NATS that needs TLS with client certificates, and one of the users."""
    files = "".join(f'{name}_file: "{path.parent / name}.pem"\n' for name in ("cert", "key", "ca"))
    path.write_text(f"tls {{ {files} verify: true }}\nauthorization {{ users = [{', '.join(users)}] }}\n")


def test_tls_and_secrets_in_files(tmp_path: Path):
    """A worker with an NKEY and a server with a password; both connect again when NATS has refused them for a while."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    seed = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER)
    (tmp_path / "nkey").write_bytes(seed)
    (tmp_path / "password").write_text("neso:a-secret-password\n")
    users = (
        f"{{nkey: {nkeys.from_seed(bytearray(seed)).public_key.decode()}}}",
        "{user: neso, password: a-secret-password}",
    )
    write_config(tmp_path / "nats.conf", *users)
    options = [f"--engine-config=nats_{name}_file={tmp_path / name}.pem" for name in ("ca", "cert", "key")]
    flags = [f"--{name}-file={tmp_path / name}.pem" for name in ("ca", "cert", "key")]
    password = f"--engine-config=nats_password_file={tmp_path / 'password'}"
    with contextlib.ExitStack() as started:
        nats = Nats(tmp_path / "data", "-c", str(tmp_path / "nats.conf"))
        started.callback(lambda: nats.process.end())
        url = nats.url.replace("nats://", "tls://")
        one = worker(url, "one", *options, f"--engine-config=nats_nkey_file={tmp_path / 'nkey'}")
        started.callback(one.end)
        server = ServerProcess(
            MODEL, f"--worker-address={url}", "--engine-config=heartbeat_timeout=6", *options, password
        )
        cluster = ClusterServer(started.enter_context(server), 5)
        text = cluster.stream("A queue is", {"temperature": 0.0})
        assert f"queue '{MODEL}'" in status(url, *flags, f"--nkey-file={tmp_path / 'nkey'}").stdout
        assert "Authorization" in status(url, *flags).stderr

        nats.process.end()
        write_config(tmp_path / "nats.conf", "{user: neso, password: another}")
        nats.start()
        wait_until(lambda: "uthorization" in one.output and "uthorization" in server.output)
        wait_until(lambda: server.get("/v2/health/ready")[0] != 200)
        nats.process.end()
        write_config(tmp_path / "nats.conf", *users)
        nats.start()
        wait_until(lambda: server.get("/v2/health/ready")[0] == 200)
        assert cluster.stream("A queue is", {"temperature": 0.0}) == text

        shown = one.output + server.output
        for pid in (one.process.pid, server.process.pid):
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                shown += " ".join(process.cmdline())
        assert "a-secret-password" not in shown and seed.decode() not in shown


@pytest.mark.parametrize(
    "option, content, message",
    [
        ("password", "word-without-user", "must have the form USER:PASSWORD"),
        ("nkey", "a word", "must contain the seed of an NKEY"),
    ],
)
def test_credentials_in_files_are_checked(tmp_path: Path, option: str, content: str, message: str):
    (tmp_path / "file").write_text(content)
    refused = status("nats://127.0.0.1:1", f"--{option}-file={tmp_path / 'file'}")
    assert refused.returncode == 1
    assert message in refused.stderr and "word" not in refused.stderr.lower().replace("password", "")
