"""`ClusterChannel` and its sockets, with workers that do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from eventually import until
from fake_worker import BLOCK, INFO, MODEL, FakeWorker

from neso.cluster.front_end import ClusterChannel
from neso.cluster.messages import EngineEvent, Introduce, Leave, Refused, Tell, Welcome
from neso.cluster.sockets import FrontEndSocket, read_token
from neso.engine.cluster_config import ClusterConfig
from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.core.stats import EngineStats
from neso.engine.errors import EngineError
from neso.engine.ipc.messages import (
    Abort,
    Add,
    CheckIntegrity,
    Integrity,
    LoadLora,
    LoraDone,
    StepOutputs,
    Unsendable,
)
from neso.generation import LoraRequest, SamplingParams

TOKEN = "a secret of the tests"


class FrontEnd:
    """A channel, its events, and the workers that have joined."""

    def __init__(self, directory: Path, **options: Any) -> None:
        scheduler = SchedulerConfig(block_size=BLOCK, max_queue_size=options.pop("max_queue_size", None))
        config = EngineConfig(model="m", scheduler=scheduler, **options)
        socket = FrontEndSocket()
        self.address = socket.listen(f"ipc://{directory}/front-end")
        self.channel = ClusterChannel(config, MODEL, [socket])
        self.outputs: list[SequenceOutput] = []
        self.events: list[Any] = []
        self._workers: list[FakeWorker] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            event = await self.channel.receive()
            if isinstance(event, StepOutputs):
                self.outputs += event.outputs
            else:
                self.events.append(event)

    def worker(self, name: str, **hello: Any) -> FakeWorker:
        worker = FakeWorker(name, self.address, **hello)
        self._workers.append(worker)
        return worker

    async def join(self, name: str, sequences: int = 4, **hello: Any) -> FakeWorker:
        worker = self.worker(name, **hello)
        await until(lambda: any(isinstance(message, Welcome) for message in worker.received))
        worker.report(sequences=sequences)
        await until(lambda: self.channel._connections[name].state.credits.sequences == sequences)
        return worker

    def add(self, name: str, **values: Any) -> None:
        sampling = values.pop("sampling", SamplingParams(seed=1))
        self.channel.send(
            Add(
                EngineRequest(
                    request_id=name, prompt_token_ids=[1, 2, 3], sampling=sampling, max_tokens=9, **values
                )
            )
        )

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == name for token in output.token_ids]

    def errors(self) -> list[str]:
        return [output.error for output in self.outputs if output.error]

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        for worker in self._workers:
            await worker.close()
        await self.channel.close(0)


Start = Callable[..., Awaitable[FrontEnd]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start front ends; they are closed at the end."""
    started: list[FrontEnd] = []

    async def start(**options: Any) -> FrontEnd:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        started.append(FrontEnd(directory, **options))
        return started[-1]

    yield start
    for front_end in started:
        await front_end.close()


async def test_request_is_granted_and_its_tokens_are_delivered(start: Start):
    front_end = await start()
    worker = await front_end.join("w")
    front_end.add("a")
    await until(lambda: worker.grants)
    assert worker.request().prompt_token_ids == [1, 2, 3]
    worker.report(worker.frame([7, 8]))
    worker.report(worker.frame([9], 2, finished=True))
    await until(lambda: front_end.tokens("a") == [7, 8, 9])
    assert not front_end.channel.queue.jobs


async def test_requests_wait_for_a_worker(start: Start):
    front_end = await start()
    first = await front_end.join("first", sequences=0)
    front_end.add("a")
    assert front_end.channel.stats().num_waiting == 1
    second = await front_end.join("second")
    await until(lambda: second.grants)
    assert not first.grants


async def test_request_of_a_worker_that_leaves_is_continued(start: Start):
    front_end = await start()
    first = await front_end.join("first")
    front_end.add("a")
    await until(lambda: first.grants)
    first.report(first.frame([7, 8]), sequences=0)
    await until(lambda: front_end.tokens("a"))
    second = await front_end.join("second")
    first.send(Leave("it was stopped"))
    await until(lambda: second.grants)
    assert second.grants[0].attempt == 2
    # The earlier attempt still sends a token: it is dropped, and the worker is introduced again.
    first.report(first.frame([99], 2))
    await until(lambda: any(isinstance(message, Introduce) for message in first.received))
    second.report(second.frame([7, 8, 9], finished=True))
    await until(lambda: front_end.tokens("a") == [7, 8, 9])


async def test_outputs_of_an_earlier_attempt_are_dropped(start: Start):
    front_end = await start()
    first = await front_end.join("first")
    front_end.add("a")
    await until(lambda: first.grants)
    old = first.frame([99])
    first.hello()  # as after a broken connection
    await until(lambda: front_end.channel.counters.lost_workers == 1)
    first.report(old)
    await until(lambda: first.cancels())
    assert (first.cancels()[0].request_id, first.cancels()[0].attempt) == ("a", 1)
    assert front_end.channel.counters.stale_frames == 1
    assert front_end.tokens("a") == []


async def test_silent_worker_is_given_up(start: Start):
    front_end = await start(heartbeat_timeout=0.2)
    await front_end.join("w")
    await until(lambda: not front_end.channel.workers)
    assert front_end.channel.counters.lost_workers == 1


async def test_worker_that_disconnects_is_given_up(start: Start):
    front_end = await start(heartbeat_timeout=0)  # only the connection tells
    worker = await front_end.join("w")
    await worker.close()
    await until(lambda: not front_end.channel.workers)


async def test_request_that_loses_every_worker_fails(start: Start):
    front_end = await start(cluster=ClusterConfig(max_attempts=2))
    front_end_workers = [await front_end.join("first"), await front_end.join("second")]
    front_end.add("poison")
    for _ in range(2):
        await until(lambda: any(worker.grants for worker in front_end_workers))
        victim = next(worker for worker in front_end_workers if worker.grants)
        front_end_workers.remove(victim)
        victim.send(Leave("a crash"))
    await until(front_end.errors)
    assert front_end.errors() == ["the request has lost 2 workers, the last one because a crash"]
    assert front_end.channel.counters.failed == 1


async def test_different_continuation_is_an_error(start: Start):
    front_end = await start()
    first, second = await front_end.join("first"), await front_end.join("second", sequences=0)
    front_end.add("a")
    await until(lambda: first.grants)
    first.report(first.frame([7, 8]))
    await until(lambda: front_end.tokens("a"))
    first.send(Leave("it was stopped"))
    second.report()
    await until(lambda: second.grants)
    second.report(second.frame([7, 3]))
    await until(front_end.errors)
    assert "could not be continued by worker 'second'" in front_end.errors()[0]


async def test_request_without_a_seed_gets_one_that_all_attempts_share(start: Start):
    front_end = await start()
    first, second = await front_end.join("first"), await front_end.join("second", sequences=0)
    front_end.add("a", sampling=SamplingParams(temperature=1.0))
    await until(lambda: first.grants)
    first.send(Leave("it was stopped"))
    second.report()
    await until(lambda: second.grants)
    assert first.request().sampling.seed == second.request().sampling.seed is not None


async def test_abort_reaches_the_worker_and_the_queue(start: Start):
    front_end = await start()
    worker = await front_end.join("w", sequences=1)
    front_end.add("running")
    await until(lambda: worker.grants)
    front_end.add("waiting")
    for name in ("waiting", "running"):
        front_end.channel.send(Abort(name))
    await until(lambda: worker.cancels())
    assert [cancel.request_id for cancel in worker.cancels()] == ["running"]
    assert not front_end.channel.queue.jobs


async def test_sequence_ended_by_the_client_stays_ended_on_the_next_worker(start: Start):
    front_end = await start()
    first, second = await front_end.join("first"), await front_end.join("second", sequences=0)
    front_end.add("a", sampling=SamplingParams(n=2, seed=1))
    await until(lambda: first.grants)
    front_end.channel.send(Abort("a", 0))
    first.send(Leave("it was stopped"))
    second.report()
    await until(lambda: second.cancels())
    assert second.cancels()[0].index == 0
    second.report(second.frame([5], index=0), second.frame([6], index=1, finished=True))
    await until(lambda: front_end.tokens("a") == [6])


async def test_full_queue_refuses_requests(start: Start):
    front_end = await start(max_queue_size=1)
    await front_end.join("w", sequences=0)
    front_end.add("a")
    front_end.add("b")
    await until(front_end.errors)
    assert front_end.errors() == ["1 requests wait already, max_queue_size is 1"]
    assert front_end.outputs[0].refused


async def test_request_expires_in_the_queue(start: Start):
    front_end = await start()
    await front_end.join("w", sequences=0)
    front_end.add("a", queue_timeout_ms=20.0)
    await until(front_end.errors)
    assert "queue_timeout_ms, 20 ms" in front_end.errors()[0]


async def test_request_that_cannot_be_encoded_is_refused(start: Start):
    front_end = await start()
    await front_end.join("w")
    with pytest.raises(Unsendable):
        front_end.add("a", cache_identity=("\ud800",))


async def test_adapter_of_a_request_is_refused(start: Start):
    front_end = await start()
    await front_end.join("w")
    front_end.add("a", lora=LoraRequest(name="x", path="/x"))
    await until(front_end.errors)
    assert "adapters in a request are not supported with workers" in front_end.errors()[0]


@pytest.mark.parametrize(
    "hello, reason",
    [
        ({"version": 0}, "version 0 of the protocol"),
        ({"model": "another"}, "another checkpoint"),
        ({"info": msgspec.structs.replace(INFO, block_size=8)}, "its block_size is 8"),
        ({"info": msgspec.structs.replace(INFO, max_model_len=8)}, "its max_model_len is 8"),
    ],
)
async def test_worker_that_does_not_fit_is_refused(start: Start, hello: dict[str, Any], reason: str):
    front_end = await start()
    await front_end.join("first")
    worker = front_end.worker("second", **hello)
    await until(lambda: worker.received)
    assert isinstance(worker.received[0], Refused) and reason in worker.received[0].reason
    assert len(front_end.channel.workers) == 1


async def test_adapter_is_loaded_by_all_workers_and_by_those_that_join_later(start: Start):
    front_end = await start()
    workers = [await front_end.join("first"), await front_end.join("second")]
    front_end.channel.send(LoadLora(5, LoraRequest(name="x", path="/x")))
    for worker in workers:
        await until(lambda worker=worker: any(isinstance(message, Tell) for message in worker.received))
        assert not front_end.events
        worker.send(EngineEvent(LoraDone(5, "")))
    await until(lambda: front_end.events == [LoraDone(5, "")])
    third = await front_end.join("third")
    await until(lambda: any(isinstance(message, Tell) for message in third.received))


async def test_adapter_that_one_worker_cannot_load_is_unloaded_from_the_others(start: Start):
    front_end = await start()
    first, second = await front_end.join("first"), await front_end.join("second")
    front_end.channel.send(LoadLora(5, LoraRequest(name="x", path="/x")))
    first.send(EngineEvent(LoraDone(5, "")))
    second.send(EngineEvent(LoraDone(5, "no such file")))
    await until(lambda: front_end.events == [LoraDone(5, "no such file")])
    await until(lambda: sum(isinstance(message, Tell) for message in first.received) == 2)


async def test_integrity_of_all_workers_is_checked(start: Start):
    front_end = await start()
    first, second = await front_end.join("first"), await front_end.join("second")
    front_end.channel.send(CheckIntegrity())
    first.send(EngineEvent(Integrity("", EngineStats())))
    second.send(EngineEvent(Integrity("a block is lost", EngineStats())))
    await until(lambda: front_end.events)
    assert front_end.events[0].message == "worker 'second': a block is lost"


async def test_counters_of_lost_workers_are_kept(start: Start):
    front_end = await start()
    worker = await front_end.join("w")
    front_end.channel.workers[0].stats = EngineStats(step=7, num_running=3)
    worker.send(Leave("it was stopped"))
    await until(lambda: not front_end.channel.workers)
    assert (front_end.channel.stats().step, front_end.channel.stats().num_running) == (7, 0)


async def test_tcp_workers_need_the_token(tmp_path: Path):
    socket = FrontEndSocket()
    address = socket.listen("tcp://127.0.0.1:*", TOKEN)
    channel = ClusterChannel(EngineConfig(model="m"), MODEL, [socket])
    strangers = [
        FakeWorker("wrong", address, "another secret of the tests"),
        FakeWorker("none", address),
    ]
    friend = FakeWorker("right", address, TOKEN)
    await until(lambda: channel.workers)
    assert [worker.name for worker in channel.workers] == ["right"]
    assert not any(stranger.received for stranger in strangers)
    for worker in (*strangers, friend):
        await worker.close()
    await channel.close(0)


def test_token_file_is_checked(tmp_path: Path):
    path = tmp_path / "token"
    with pytest.raises(EngineError, match="cannot be read"):
        read_token(str(path))
    path.write_text("short\n")
    with pytest.raises(EngineError, match="less than 16 characters"):
        read_token(str(path))
    path.write_text(f"{TOKEN}\n")
    assert read_token(str(path)) == TOKEN


@pytest.mark.parametrize(
    "options, message",
    [
        ({"workers": -1}, "workers must be at least 0"),
        ({"max_attempts": 0}, "max_attempts must be at least 1"),
        ({"worker_address": "http://x"}, "must begin with tcp:// or ipc://"),
        ({"worker_address": "tcp://0.0.0.0:9"}, "needs a file with a token"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_options("m", options)
