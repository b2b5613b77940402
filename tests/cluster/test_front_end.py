"""`ClusterChannel` and its sockets, with workers that do what the test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from eventually import until
from fake_worker import BLOCK, INFO, MODEL, FakeWorker

from neso.cluster.front_end import ClusterChannel
from neso.cluster.messages import Credits, EngineEvent, Frame, Introduce, Leave, Refused, Report, Welcome
from neso.cluster.sockets import FrontEndSocket, read_token
from neso.engine.cluster_config import DECODE, PREFILL, ClusterConfig
from neso.engine.config import EngineConfig
from neso.engine.core.prefix_keys import BlockChanges
from neso.engine.core.request import EngineRequest, KvImported, SequenceOutput
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
    ReleaseLease,
    SendBlockKeys,
    StepOutputs,
    UnloadLora,
    Unsendable,
)
from neso.generation import LoraRequest, SamplingParams, Span

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
        self.spans: list[Span] = []
        self.channel.on_span = lambda request_id, span: self.spans.append(span)
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
        await until(lambda: self.credits(name) == sequences)
        return worker

    def credits(self, name: str) -> int | None:
        """Return for how many sequences a worker has asked; None if it has not joined."""
        found = [one.credits.sequences for one in self.channel.workers if one.name == name]
        return found[0] if found else None

    def add(self, name: str, **values: Any) -> None:
        sampling = values.pop("sampling", SamplingParams(seed=1))
        prompt = values.pop("prompt", [1, 2, 3])
        self.channel.send(
            Add(
                EngineRequest(
                    request_id=name, prompt_token_ids=prompt, sampling=sampling, max_tokens=9, **values
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


async def test_blocks_that_a_worker_reports_are_known_and_a_gap_is_healed(start: Start):
    front_end = await start()
    worker = await front_end.join("w")
    asked = lambda: worker.commands(SendBlockKeys)  # noqa: E731
    await until(lambda: len(asked()) == 1)
    blocks = front_end.channel.workers[0].blocks
    worker.report(blocks=[BlockChanges(1, [5, 6], complete=True)])
    worker.report(blocks=[BlockChanges(2, [7], [5])])
    await until(lambda: len(blocks) == 2)
    worker.report(blocks=[BlockChanges(4, [9])])
    await until(lambda: len(asked()) == 2)
    worker.report(blocks=[BlockChanges(5, [7, 8, 9], complete=True)])
    await until(lambda: len(blocks) == 3)


async def test_without_tracked_blocks_workers_are_not_asked(start: Start):
    front_end = await start(cluster=ClusterConfig(max_tracked_blocks=0))
    worker = await front_end.join("w")
    front_end.add("a")
    await until(lambda: worker.grants)
    assert not worker.commands(SendBlockKeys)


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
    assert second.request().output_token_ids == [7, 8]
    second.report(second.frame([9], 2, finished=True))
    await until(lambda: front_end.tokens("a") == [7, 8, 9])


async def test_request_with_several_outputs_starts_again_and_each_token_is_delivered_once(start: Start):
    front_end = await start()
    first, second = await front_end.join("first"), await front_end.join("second", sequences=0)
    front_end.add("a", sampling=SamplingParams(n=2, seed=1))
    await until(lambda: first.grants)
    first.report(first.frame([7, 8], index=0), first.frame([5], index=1))
    await until(lambda: len(front_end.tokens("a")) == 3)
    first.send(Leave("it was stopped"))
    second.report()
    await until(lambda: second.grants)
    assert second.request().output_token_ids == []
    second.report(
        second.frame([7, 8, 9], finished=True, index=0), second.frame([5, 6], finished=True, index=1)
    )
    await until(lambda: front_end.tokens("a") == [7, 8, 5, 9, 6])


async def test_beam_request_ends_after_the_beams_that_are_returned(start: Start):
    """The engine outputs the best n beams: a place that was kept for the others would never be free again."""
    front_end = await start()
    worker = await front_end.join("w")
    front_end.add("a", sampling=SamplingParams(beam_width=3, n=2))
    await until(lambda: worker.grants)
    assert worker.grants[0].cost.sequences == 3
    worker.report(*(worker.frame([7, index], finished=True, index=index) for index in range(2)))
    await until(lambda: not front_end.channel.queue.jobs)
    assert not front_end.channel.workers[0].num_sequences and not worker.cancels()


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
    front_end.add("a", sampling=SamplingParams(n=2, seed=1))
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


async def test_requests_are_refused_while_the_predicted_wait_is_too_long(start: Start):
    front_end = await start(cluster=ClusterConfig(max_queue_seconds=1.0))
    await front_end.join("w", sequences=0)
    front_end.add("first")  # nothing was measured yet
    front_end.channel.workers[0].observe_prefill(10.0, 10)
    front_end.add("second")
    await until(front_end.errors)
    assert front_end.errors() == ["the predicted wait is 3.0 s, max_queue_seconds is 1"]
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
        await until(lambda worker=worker: worker.commands(LoadLora))
        assert not front_end.events
        worker.send(EngineEvent(LoraDone(5, "")))
    await until(lambda: front_end.events == [LoraDone(5, "")])
    third = await front_end.join("third")
    await until(lambda: third.commands(LoadLora))


async def test_adapter_that_one_worker_cannot_load_is_unloaded_from_the_others(start: Start):
    front_end = await start()
    first, second = await front_end.join("first"), await front_end.join("second")
    front_end.channel.send(LoadLora(5, LoraRequest(name="x", path="/x")))
    first.send(EngineEvent(LoraDone(5, "")))
    second.send(EngineEvent(LoraDone(5, "no such file")))
    await until(lambda: front_end.events == [LoraDone(5, "no such file")])
    await until(lambda: first.commands(UnloadLora))


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
        ({"prefill_workers": 1}, "prefill_workers need decode_workers"),
        ({"ttft_target": 1}, "must be given together"),
        ({"ttft_target": 1, "itl_target": 0}, "itl_target must be above 0"),
        ({"max_queue_seconds": 0}, "max_queue_seconds must be above 0"),
        ({"max_attempts": 0}, "max_attempts must be at least 1"),
        ({"worker_address": "http://x"}, "must begin with tcp:// or ipc://"),
        ({"worker_address": "tcp://0.0.0.0:9"}, "needs a file with a token"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_options("m", options)


# -- prompts that another worker computes -----------------------------------------------------------------------

KV_INFO = msgspec.structs.replace(INFO, kv_address="ipc://kv")
LONG = [*range(1, 101)]


async def split(start: Start) -> tuple[FrontEnd, FakeWorker, FakeWorker]:
    """Start a front end with a prefill worker and a decode worker."""
    front_end = await start(cluster=ClusterConfig(min_remote_prefill=64))
    prefill = await front_end.join("prefill", roles=PREFILL, info=KV_INFO)
    decode = await front_end.join("decode", roles=DECODE, info=KV_INFO)
    return front_end, prefill, decode


def released(worker: FakeWorker) -> list[str]:
    return [command.transfer_id for command in worker.commands(ReleaseLease)]


def finished_export(worker: FakeWorker) -> Frame:
    return worker.frame([], finished=True)


async def test_long_prompt_is_computed_by_a_prefill_worker(start: Start):
    front_end, prefill, decode = await split(start)
    front_end.add("a", prompt=LONG)
    await until(lambda: prefill.grants and decode.grants)
    export, source = prefill.request().kv_export, decode.request().kv_import
    assert export is not None and source is not None
    assert (source.address, source.transfer_id) == ("ipc://kv", export.transfer_id)
    assert prefill.grants[0].cost.prefill_tokens == 100
    assert decode.grants[0].cost.prefill_tokens == 0
    prefill.report(finished_export(prefill))
    decode.report(decode.frame([7], imported_tokens=96))
    await until(lambda: front_end.tokens("a") == [7])
    counters = front_end.channel.counters
    assert (counters.remote_prefills, counters.imported_tokens, counters.fallbacks) == (1, 96, 0)
    for worker in front_end.channel.workers:
        await until(lambda worker=worker: worker.num_prefill_tokens == 0)
    prefill_state = next(worker for worker in front_end.channel.workers if worker.name == "prefill")
    assert prefill_state.num_sequences == 0 and not prefill_state.exports


async def test_short_or_cached_prompt_stays_on_the_decode_worker(start: Start):
    front_end, prefill, decode = await split(start)
    front_end.add("short")
    await until(lambda: decode.grants)
    front_end.add("long", prompt=LONG)
    await until(lambda: len(decode.grants) == 2)
    front_end.add("cached", prompt=[*LONG, 5])
    await until(lambda: len(decode.grants) == 3)
    assert [decode.request(number).kv_import is None for number in range(3)] == [True, False, True]
    assert len(prefill.grants) == 1


async def test_request_waits_until_both_workers_have_room(start: Start):
    front_end, prefill, decode = await split(start)
    prefill.report(sequences=0)
    await until(lambda: not any(worker.credits.sequences for worker in front_end.channel.workers[:1]))
    front_end.add("a", prompt=LONG)
    assert front_end.channel.stats().num_waiting == 1
    prefill.report(sequences=1)
    await until(lambda: prefill.grants and decode.grants)


async def test_failed_transfer_is_counted(start: Start):
    front_end, _, decode = await split(start)
    front_end.add("a", prompt=LONG)
    await until(lambda: decode.grants)
    decode.report(decode.frame([7], import_error="no answer"))
    await until(lambda: front_end.tokens("a") == [7])
    assert front_end.channel.counters.fallbacks == 1


async def test_without_prefill_workers_the_decode_worker_computes_and_it_is_counted(start: Start):
    front_end = await start(cluster=ClusterConfig(min_remote_prefill=64))
    decode = await front_end.join("decode", roles=DECODE, info=KV_INFO)
    front_end.add("a", prompt=LONG)
    await until(lambda: decode.grants)
    assert decode.request().kv_import is None
    assert front_end.channel.counters.fallbacks == 1


async def test_lost_prefill_worker_repeats_requests_that_wait_for_it(start: Start):
    front_end, prefill, decode = await split(start)
    front_end.add("a", prompt=LONG)
    await until(lambda: decode.grants)
    prefill.send(Leave("a crash"))
    await until(lambda: len(decode.grants) == 2)
    assert [(cancel.request_id, cancel.attempt) for cancel in decode.cancels()] == [("a", 1)]
    assert (decode.grants[1].attempt, decode.request().kv_import) == (2, None)


async def test_prompt_that_the_prefill_worker_rejects_is_computed_by_the_decode_worker(start: Start):
    front_end, prefill, decode = await split(start)
    front_end.add("a", prompt=LONG)
    await until(lambda: prefill.grants and decode.grants)
    rejected = SequenceOutput.failed("a", 0, "too long for the cache")
    prefill.report(Frame(prefill.grants[0].attempt, 0, rejected))
    await until(lambda: len(decode.grants) == 2)
    assert decode.request().kv_import is None and len(prefill.grants) == 1
    assert front_end.channel.counters.fallbacks == 1 and not front_end.errors()


async def test_next_decode_worker_takes_the_prompt_that_was_computed(start: Start):
    front_end, prefill, decode = await split(start)
    second = await front_end.join("second", sequences=0, roles=DECODE, info=KV_INFO)
    front_end.add("a", prompt=LONG)
    await until(lambda: decode.grants)
    prefill.report(finished_export(prefill))
    decode.send(Leave("a crash"))
    second.report()
    await until(lambda: second.grants)
    assert len(prefill.grants) == 1
    source, export = second.request().kv_import, prefill.request().kv_export
    assert source is not None and export is not None and source.transfer_id == export.transfer_id


async def test_blocks_of_a_cancelled_request_are_released(start: Start):
    front_end, prefill, decode = await split(start)
    front_end.add("a", prompt=LONG)
    await until(lambda: decode.grants)
    front_end.channel.send(Abort("a"))
    await until(lambda: released(prefill) and prefill.cancels())
    assert not any(worker.exports or worker.num_sequences for worker in front_end.channel.workers)


async def test_roles_change_under_load(start: Start):
    # Outputs are short, so a prompt on a decode worker would delay them by more than the target.
    targets = ClusterConfig(ttft_target=0.1, itl_target=1e-6, role_period=0.05)
    front_end = await start(cluster=targets)
    await front_end.join("prefill", sequences=0, roles=PREFILL, info=KV_INFO)
    decode = await front_end.join("decode", roles=DECODE, info=KV_INFO)
    second = await front_end.join("second", roles=DECODE, info=KV_INFO)
    front_end.channel.queue.totals.finished += 1
    front_end.channel.queue.totals.output_tokens += 2
    for worker in front_end.channel.workers:
        worker.observe_prefill(10.0, 10)
    changed: list[int] = []
    front_end.channel.connections.on_change(lambda: changed.append(1))
    front_end.add("a", prompt=[*range(300)])
    await until(lambda: changed)
    assert sum("prefill" in worker.roles for worker in front_end.channel.workers) >= 2
    assert front_end.channel.counters.role_changes >= 1
    await until(lambda: decode.grants or second.grants)  # the request starts at once


async def test_worker_with_a_role_needs_kv_transfers(start: Start):
    front_end = await start()
    worker = front_end.worker("decode", roles=DECODE)
    await until(lambda: worker.received)
    assert isinstance(worker.received[0], Refused) and "transfers no KV cache" in worker.received[0].reason


@pytest.mark.parametrize(
    "sampling", [SamplingParams(prompt_logprobs=0), SamplingParams(return_context_logits=True)]
)
async def test_request_that_needs_logits_of_its_prompt_is_not_split(start: Start, sampling: SamplingParams):
    front_end, prefill, decode = await split(start)
    front_end.add("a", prompt=LONG, sampling=sampling)
    await until(lambda: decode.grants)
    assert decode.request().kv_import is None and not prefill.grants


# -- traces ---------------------------------------------------------------------------------------------------


def parts(front_end: FrontEnd) -> list[tuple[str, str, int, bool]]:
    """Return name, worker, attempt of each span, and whether it has failed."""
    return [
        (
            span.name,
            str(span.attributes.get("worker", "")),
            int(span.attributes.get("attempt", 0)),
            bool(span.error),
        )
        for span in front_end.spans
    ]


async def test_spans_of_a_transferred_prompt(start: Start):
    front_end, prefill, decode = await split(start)
    front_end.add("a", prompt=LONG, trace="00-trace-01")
    await until(lambda: prefill.grants and decode.grants)
    assert decode.request().trace == prefill.request().trace == "00-trace-01"
    now = time.monotonic_ns()
    prefill.report(prefill.frame([], finished=True, exported_tokens=96, cached_tokens=32, scheduled_ns=now))
    await until(lambda: len(front_end.spans) == 2)
    imported = KvImported(now, now + 5, blocks=6, missing=1, num_bytes=4096, transport="shm")
    first = {
        "imported_tokens": 96,
        "imported": imported,
        "scheduled_ns": now,
        "import_error": "one is missing",
    }
    decode.report(decode.frame([7], **first))
    decode.report(decode.frame([8, 9], 1, finished=True))
    await until(lambda: len(front_end.spans) == 5)
    assert parts(front_end) == [
        ("queue", "decode", 1, False),
        ("prefill", "prefill", 1, False),
        ("kv_transfer", "decode", 1, True),
        ("prefill", "decode", 1, False),
        ("decode", "decode", 1, False),
    ]
    _, remote, transfer, rest, decoding = [span.attributes for span in front_end.spans]
    assert (remote["tokens"], remote["cached_tokens"]) == (64, 32)
    assert [transfer[name] for name in ("transport", "blocks", "missing_blocks", "bytes")] == [
        "shm",
        6,
        1,
        4096,
    ]
    assert front_end.spans[2].end_ns - front_end.spans[2].start_ns == 5
    assert rest["tokens"] == len(LONG) - 96
    assert (decoding["steps"], decoding["tokens"]) == (2, 3)
    assert all(span.start_ns <= span.end_ns for span in front_end.spans)


async def test_lost_attempts_have_spans_of_their_own(start: Start):
    front_end = await start()
    one = await front_end.join("one")
    front_end.add("a", trace="t")
    await until(lambda: one.grants)
    one.report(one.frame([7], scheduled_ns=time.monotonic_ns()))
    await until(lambda: front_end.tokens("a") == [7])
    one.send(Leave("it was stopped"))
    two = await front_end.join("two")
    await until(lambda: two.grants)
    two.send(Leave("it was stopped"))
    three = await front_end.join("three")
    await until(lambda: three.grants)
    three.report(three.frame([8], 1, finished=True, scheduled_ns=time.monotonic_ns()))
    await until(lambda: len(front_end.spans) == 8)
    assert parts(front_end) == [
        ("queue", "one", 1, False),
        ("prefill", "one", 1, False),
        ("decode", "one", 1, True),
        ("queue", "two", 2, False),
        ("prefill", "two", 2, True),
        ("queue", "three", 3, False),
        ("prefill", "three", 3, False),
        ("decode", "three", 3, False),
    ]
    assert front_end.spans[2].error == "it was stopped"


async def test_spans_of_requests_that_end_early(start: Start):
    front_end = await start()
    worker = await front_end.join("one", sequences=1)
    front_end.add("not traced")
    await until(lambda: worker.grants)
    front_end.add("expires", trace="t", queue_timeout_ms=10.0)
    await until(lambda: front_end.errors())
    assert parts(front_end) == [("queue", "", 0, True)]
    front_end.channel.send(Abort("not traced"))
    worker.report(sequences=1)
    front_end.add("cancelled", trace="t")
    await until(lambda: len(worker.grants) == 2)
    worker.report(worker.frame([7]))
    await until(lambda: front_end.tokens("cancelled") == [7])
    front_end.channel.send(Abort("cancelled"))
    assert parts(front_end)[1:] == [
        ("queue", "one", 1, False),
        ("prefill", "one", 1, False),
        ("decode", "one", 1, False),
    ]


async def test_times_of_a_worker_with_another_clock(start: Start):
    front_end = await start()
    worker = await front_end.join("one")
    before = time.monotonic_ns()
    front_end.add("a", trace="t")
    await until(lambda: worker.grants)
    clock = 10**18  # of the worker
    frame = worker.frame([7], finished=True, scheduled_ns=clock - 1)
    worker.send(Report(Credits(4, 1000, 1000, 1), EngineStats(num_blocks=64), [frame], [], clock))
    await until(lambda: len(front_end.spans) == 3)
    assert all(before <= span.start_ns <= span.end_ns for span in front_end.spans)
    (output,) = front_end.outputs
    assert before <= output.scheduled_ns <= time.monotonic_ns()


async def test_prefill_goes_on_in_the_trace_when_the_decode_worker_is_lost(start: Start):
    front_end, prefill, decode = await split(start)
    front_end.add("a", prompt=LONG, trace="t")
    await until(lambda: prefill.grants and decode.grants)
    decode.send(Leave("it was stopped"))
    await until(lambda: len(front_end.spans) == 2)
    prefill.report(prefill.frame([], finished=True, exported_tokens=96))
    other = await front_end.join("other", roles=DECODE, info=KV_INFO)
    await until(lambda: other.grants)
    other.report(other.frame([7], finished=True, imported_tokens=96))
    await until(lambda: len(front_end.spans) == 6)
    assert sorted(parts(front_end)) == [
        ("decode", "other", 2, False),
        ("prefill", "decode", 1, True),
        ("prefill", "other", 2, False),
        ("prefill", "prefill", 1, False),
        ("queue", "decode", 1, False),
        ("queue", "other", 2, False),
    ]
