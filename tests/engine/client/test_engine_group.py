"""`EngineGroup`: choice of the engine, the common queue, ends of engines. Engines are stand-ins without a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from eventually import until

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.engine_group import EngineGroup
from neso.engine.client.output_processor import RequestState
from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest
from neso.engine.core.stats import DraftStats, EngineStats, LogitsProcessorStats, StaticBatchStats
from neso.engine.errors import EngineBusy, EngineDead, EngineError
from neso.engine.ipc.messages import EngineInfo
from neso.engine.text.tokenizer import NO_TOKENIZER
from neso.generation import (
    Completion,
    GenerationOutput,
    InvalidParameter,
    LoraRequest,
    SamplingParams,
    Usage,
)

BLOCK = 16
INFO = EngineInfo("native", 4096, 4, 384, 64, BLOCK, 2**20, 0.1, max_num_batched_tokens=64)


class StandIn:
    """An engine whose requests end when the test says so."""

    def __init__(self) -> None:
        self.info, self.alive, self.stats, self.max_model_len = INFO, True, EngineStats(), 4096
        self.running: dict[str, Callable[[Any], object]] = {}
        self.aborted: list[str] = []
        self.loras: dict[str, str | None] = {}
        self.lora_error: EngineError | None = None
        self._on_dead: list[Callable[[str], None]] = []

    def on_dead(self, callback: Callable[[str], None]) -> None:
        self._on_dead.append(callback)

    def submit(self, state: RequestState, deliver: Callable[[Any], object]) -> None:
        if not self.alive:
            raise EngineDead("it has ended")
        self.running[state.request.request_id] = deliver

    def abort(self, state: RequestState) -> None:
        del self.running[state.request.request_id]
        self.aborted.append(state.request.request_id)

    def output(self, name: str, tokens: list[int], *, finished: bool) -> None:
        deliver = self.running.pop(name) if finished else self.running[name]
        completion = Completion(index=0, text="", token_ids=tokens)
        output = GenerationOutput(name, [completion], Usage(3, len(tokens)), finished)
        deliver(output)

    def die(self) -> None:
        self.alive = False
        running, self.running = self.running, {}
        for deliver in running.values():
            deliver(EngineDead("it has ended"))
        for callback in self._on_dead:
            callback("it has ended")

    async def restart(self) -> EngineInfo:
        self.alive = True
        return INFO

    async def catch_up(self, changes: list[LoraRequest | str]) -> None:
        for change in changes:
            await (self.unload_lora(change) if isinstance(change, str) else self.load_lora(change))

    def list_loras(self) -> dict[str, str | None]:
        return self.loras

    async def load_lora(self, lora: LoraRequest) -> None:
        if not self.alive:
            raise EngineDead("it has ended")
        if self.lora_error is not None:
            raise self.lora_error
        self.loras[lora.name] = lora.path

    async def unload_lora(self, name: str) -> None:
        if not self.alive:
            raise EngineDead("it has ended")
        if name not in self.loras:
            raise EngineError(f"there is no adapter '{name}'")
        del self.loras[name]


class Client:
    """Submits requests to a group of stand-ins."""

    def __init__(self, count: int = 2, **options: object) -> None:
        self.engines = [StandIn() for _ in range(count)]
        config = EngineConfig.from_options("", options)
        self.group = EngineGroup([cast(AsyncEngine, engine) for engine in self.engines], config)
        self.states: dict[str, RequestState] = {}
        self.received: dict[str, list[Any]] = {}

    def submit(self, name: str, prompt: list[int] | None = None, **fields: Any) -> None:
        sampling = SamplingParams(n=fields.pop("n", 1))
        request = EngineRequest(
            request_id=name, prompt_token_ids=prompt or [1, 2, 3], sampling=sampling, max_tokens=8, **fields
        )
        state = self.states[name] = RequestState(request, NO_TOKENIZER)
        self.received[name] = []
        self.group.submit(state, self.received[name].append)

    def engine_of(self, name: str) -> int | None:
        places = [number for number, engine in enumerate(self.engines) if name in engine.running]
        assert len(places) <= 1
        return places[0] if places else None

    def finish(self, name: str, tokens: list[int] | None = None) -> None:
        number = self.engine_of(name)
        assert number is not None
        self.engines[number].output(name, tokens or [9], finished=True)


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 37 + i * 11) % 300 for i in range(length)]


async def test_requests_are_spread_over_idle_engines():
    client = Client()
    for number in range(4):
        client.submit(str(number), prompt(number, 40))
    assert [client.engine_of(str(number)) for number in range(4)] == [0, 1, 0, 1]


async def test_request_goes_to_the_engine_with_most_of_its_blocks():
    client = Client()
    shared = prompt(1, 320)
    client.submit("first", [*prompt(5, 10)])
    client.submit("holder", shared)
    assert client.engine_of("holder") == 1
    client.finish("first")
    client.finish("holder")
    for number in range(3):
        client.submit(f"again-{number}", [*shared, *prompt(10 + number, 5)])
        assert client.engine_of(f"again-{number}") == 1
    client.submit("other", prompt(30, 40))
    assert client.engine_of("other") == 0


async def test_much_busier_engine_is_avoided_despite_its_prefix():
    client = Client()
    shared = prompt(1, 48)
    client.submit("a", shared)
    client.submit("b", [*shared, 1])
    assert client.engine_of("b") == 0, "it waits for the prefill of its prefix in engine 0"
    client.submit("c", [*shared, 1])
    assert client.engine_of("c") == 1, "with two requests in front of it, engine 1 is faster"
    for name in "abc":
        client.finish(name)
    names = [f"r{number}" for number in range(6)]
    for name in names:
        client.submit(name, [*shared, len(name)])
        number = client.engine_of(name)
        assert number is not None
        client.engines[number].output(name, [1], finished=False)
    assert {client.engine_of(name) for name in names} == {0, 1}


async def test_generated_tokens_count_as_a_prefix():
    client = Client()
    client.submit("filler", prompt(9, 8))
    turn, reply = prompt(1, 2 * BLOCK), prompt(2, 6 * BLOCK)
    client.submit("turn", turn)
    assert client.engine_of("turn") == 1
    client.finish("turn", reply)
    client.finish("filler")
    client.submit("next", [*turn, *reply, 5, 6])
    assert client.engine_of("next") == 1


async def test_salts_and_adapters_do_not_share_prefixes():
    client = Client()
    shared = prompt(1, 320)
    client.submit("holder", shared, cache_identity=("salt",))
    client.finish("holder")
    client.submit("busy", shared, cache_identity=("salt",))
    client.submit("unsalted", shared)
    client.submit("salted", [*shared, 1], cache_identity=("salt",))
    assert [client.engine_of(name) for name in ("busy", "unsalted", "salted")] == [0, 1, 0]


async def test_requests_wait_in_one_queue_and_go_to_the_first_engine_with_room():
    client = Client()
    for number in range(8):
        client.submit(f"r{number}")
    client.submit("w0")
    client.submit("w1")
    assert client.group.num_queued == 2 and client.group.stats.num_waiting == 2
    client.finish(next(iter(client.engines[1].running)))
    assert (client.engine_of("w0"), client.engine_of("w1")) == (1, None)
    client.finish(next(iter(client.engines[0].running)))
    assert client.engine_of("w1") == 0 and client.group.num_queued == 0


async def test_queue_respects_priorities():
    client = Client(priority_ageing_seconds=0)
    for number in range(8):
        client.submit(f"r{number}")
    client.submit("low", priority=5)
    client.submit("high", priority=-5)
    client.finish("r0")
    assert client.engine_of("high") is not None and client.engine_of("low") is None


async def test_request_with_several_sequences_waits_for_enough_slots():
    client = Client()
    for number in range(6):
        client.submit(f"r{number}")
    client.submit("wide", n=2)
    client.submit("behind")
    assert client.engine_of("wide") is None and client.engine_of("behind") is None
    client.finish("r0")
    assert client.engine_of("wide") == 0


async def test_engine_gets_prompts_for_few_steps_in_advance():
    client = Client()
    for number in range(6):
        client.submit(f"r{number}", prompt(number, 100))
    assert [len(engine.running) for engine in client.engines] == [2, 2]
    client.engines[0].output("r0", [1], finished=False)
    assert [len(engine.running) for engine in client.engines] == [3, 2]


async def test_full_queue_rejects_requests():
    client = Client(max_queue_size=1)
    for number in range(9):
        client.submit(f"r{number}")
    with pytest.raises(EngineBusy, match="max_queue_size is 1"):
        client.submit("too many")
    assert client.group.num_queued == 1


async def test_waiting_request_expires():
    client = Client()
    for number in range(8):
        client.submit(f"r{number}")
    client.submit("impatient", queue_timeout_ms=1)
    await until(lambda: client.received["impatient"])
    (error,) = client.received["impatient"]
    assert isinstance(error, EngineBusy) and "queue_timeout_ms, 1 ms" in str(error)
    assert client.group.num_queued == 0


async def test_waiting_and_running_requests_are_aborted():
    client = Client()
    for number in range(8):
        client.submit(f"r{number}")
    client.submit("w0")
    client.submit("w1")
    client.group.abort(client.states["w0"])
    client.group.abort(client.states["r3"])
    assert client.engines[1].aborted == ["r3"] and client.engine_of("w1") == 1
    client.group.abort(client.states["r3"])  # no effect
    assert client.group.num_queued == 0


async def test_duplicate_ids_are_rejected_across_engines():
    client = Client()
    client.submit("a")
    with pytest.raises(InvalidParameter, match="in flight already"):
        client.submit("a")


async def test_other_engines_serve_when_one_ends():
    client = Client()
    for number in range(8):
        client.submit(f"r{number}")
    client.submit("w0")
    of_first = list(client.engines[0].running)
    client.engines[0].die()
    assert all(isinstance(client.received[name][0], EngineDead) for name in of_first)
    assert client.engine_of("w0") is None and not client.received["w0"], "it waits for the other engine"
    client.finish(next(iter(client.engines[1].running)))
    assert client.engine_of("w0") == 1
    client.submit("w1")
    await client.group.restart(0)
    assert client.engine_of("w1") == 0


async def test_waiting_requests_fail_when_the_last_engine_ends():
    client = Client()
    for number in range(9):
        client.submit(f"r{number}")
    client.engines[0].die()
    assert client.group.alive
    client.engines[1].die()
    assert all(isinstance(received[0], EngineDead) for received in client.received.values())
    assert not client.group.alive
    with pytest.raises(EngineDead):
        client.submit("late")


async def test_ends_of_engines_are_reported_before_waiting_requests_fail():
    client = Client()
    seen: list[tuple[int, str, int]] = []
    client.group.on_dead(
        lambda number, reason: seen.append((number, reason, len(client.received["waiting"])))
    )
    for number in range(8):
        client.submit(f"r{number}")
    client.submit("waiting")
    client.engines[1].die()
    client.engines[0].die()
    assert seen == [(1, "it has ended", 0), (0, "it has ended", 0)]
    assert isinstance(client.received["waiting"][0], EngineDead)


async def test_prefixes_of_an_ended_engine_are_forgotten():
    client = Client()
    shared = prompt(1, 320)
    client.submit("holder", shared)
    client.finish("holder")
    client.engines[0].die()
    await client.group.restart(0)
    client.submit("other", [1])
    client.submit("busy", [1])
    assert [client.engine_of(name) for name in ("other", "busy")] == [1, 0]
    client.submit("again", shared)
    assert client.engine_of("again") == 1


async def test_adapters_are_loaded_in_all_engines_or_in_none():
    client = Client()
    await client.group.load_lora(LoraRequest(name="style", path="/a"))
    assert [engine.loras for engine in client.engines] == [{"style": "/a"}] * 2
    client.engines[1].lora_error = EngineError("no room")
    with pytest.raises(EngineError, match="no room"):
        await client.group.load_lora(LoraRequest(name="new", path="/b"))
    with pytest.raises(EngineError, match="no room"):
        await client.group.load_lora(LoraRequest(name="style", path="/c"))
    assert [engine.loras for engine in client.engines] == [{"style": "/a"}] * 2
    await client.group.unload_lora("style")
    assert client.group.list_loras() == {}
    with pytest.raises(EngineError, match="no adapter"):
        await client.group.unload_lora("style")


async def test_restarted_engine_makes_the_changes_that_it_has_missed():
    client = Client()
    await client.group.load_lora(LoraRequest(name="old", path="/a"))
    client.engines[0].die()
    await client.group.load_lora(LoraRequest(name="new", path="/b"))
    await client.group.unload_lora("old")
    await client.group.restart(0)
    assert client.engines[0].loras == client.engines[1].loras == {"new": "/b"}


async def test_adapter_without_source_goes_to_the_engine_that_has_it():
    client = Client()
    client.submit("busy", prompt(1, 20))
    client.submit("with source", lora=LoraRequest(name="lora_task_id 7", path="/a"))
    assert client.engine_of("with source") == 1
    client.submit("before it is loaded", lora=LoraRequest(name="lora_task_id 7"))
    client.engines[1].loras["lora_task_id 7"] = None
    client.submit("c", lora=LoraRequest(name="lora_task_id 7"))
    client.submit("d", lora=LoraRequest(name="lora_task_id 7"))
    client.submit("waits", lora=LoraRequest(name="lora_task_id 7"))
    assert {client.engine_of(name) for name in ("before it is loaded", "c", "d")} == {1}
    assert client.engine_of("waits") is None
    client.submit("passes", prompt(3, 20))
    assert client.engine_of("passes") is None, "new requests go behind those that wait"
    client.finish("busy")
    assert client.engine_of("passes") == 0 and client.engine_of("waits") is None


async def test_adapter_in_use_attracts_requests():
    client = Client()
    for engine in client.engines:
        engine.loras = {"a": "/a", "b": "/b"}
    client.submit("a0", lora=LoraRequest(name="a"))
    client.submit("b0", lora=LoraRequest(name="b"))
    client.submit("b1", lora=LoraRequest(name="b"))
    client.submit("a1", lora=LoraRequest(name="a"))
    assert [client.engine_of(name) for name in ("a0", "b0", "b1", "a1")] == [0, 1, 1, 0]


async def test_group_with_one_engine_leaves_the_queue_to_it():
    client = Client(count=1)
    for number in range(9):
        client.submit(f"r{number}")
    assert len(client.engines[0].running) == 9 and client.group.num_queued == 0
    client.group.abort(client.states["r8"])
    assert client.engines[0].aborted == ["r8"]


def test_statistics_are_summed():
    first = EngineStats(
        step=10, num_running=3, num_blocks=64, drafts=DraftStats(5, 9, 4, [3, 1]),
        logits_processors={"a": LogitsProcessorStats(1, 0.5, 0)}, static_batch=StaticBatchStats(1, 2, 3),
    )  # fmt: skip
    second = EngineStats(
        step=2, num_running=1, num_blocks=64, logits_processors={"a": LogitsProcessorStats(2, 1.0, 1)}
    )
    total = EngineStats.sum([first, second])
    assert (total.step, total.num_running, total.num_blocks) == (12, 4, 128)
    assert total.drafts.accepted_at == [3, 1] and total.static_batch == StaticBatchStats(1, 2, 3)
    assert total.logits_processors["a"].rows == 3
    assert EngineStats.sum([first]) is first


async def test_stop_ends_waiting_requests():
    client = Client()

    async def stop(timeout: float) -> None:
        await asyncio.sleep(0)

    for engine in client.engines:
        engine.stop = stop  # type: ignore[attr-defined]
    for number in range(9):
        client.submit(f"r{number}")
    await client.group.stop()
    assert isinstance(client.received["r8"][0], EngineDead)
