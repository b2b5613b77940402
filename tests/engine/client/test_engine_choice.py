"""Choice of the engine, simulated: the real `EngineGroup` and schedulers, engines without a model, virtual time."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.engine_group import EngineGroup
from neso.engine.client.engine_load import EngineLoad, GroupRequest, LeastCost
from neso.engine.client.output_processor import RequestState
from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.scheduler_config import CPU_LIMITS
from neso.engine.core.step import Step
from neso.engine.ipc.messages import EngineInfo
from neso.engine.text.tokenizer import NO_TOKENIZER
from neso.generation import Completion, GenerationOutput, SamplingParams, Usage

Choice = Callable[[GroupRequest, Sequence[EngineLoad]], EngineLoad]
BLOCK = 16
STEP_COST, DECODE_COST = 8, 2
"""Time of a step, and of each of its decoding sequences; the unit is the time of a prompt token."""


class SimulatedEngine:
    """An engine that schedules steps and keeps a prefix cache, but computes nothing."""

    def __init__(self, simulation: Simulation, config: EngineConfig, num_blocks: int) -> None:
        scheduler = config.scheduler.resolve(CPU_LIMITS)
        self.info = EngineInfo(
            "native", 8192, scheduler.max_num_seqs, num_blocks * BLOCK, num_blocks, BLOCK, 2**20, 0.1
        )
        self.alive = True
        self.scheduler = Scheduler(scheduler, num_blocks)
        self._simulation = simulation
        self._deliver: dict[str, Callable[[Any], object]] = {}
        self._busy = False

    def on_dead(self, callback: Callable[[str], None]) -> None:
        pass

    def submit(self, state: RequestState, deliver: Callable[[Any], object]) -> None:
        self._deliver[state.request.request_id] = deliver
        self.scheduler.add(state.request)
        self._start_step()

    def _start_step(self) -> None:
        if not self._busy and self.scheduler.has_work:
            self._busy = True
            self._simulation.call_later(0, self._step)

    def _step(self) -> None:
        step = self.scheduler.schedule()
        self.scheduler.advance(step)
        decoding = [s.sequence.num_tokens > s.sequence.num_prompt_tokens for s in step.scheduled]
        seconds = STEP_COST + sum(
            DECODE_COST if decodes else scheduled.num_new_tokens
            for scheduled, decodes in zip(step.scheduled, decoding, strict=True)
        )
        self._simulation.call_later(seconds, partial(self._end_step, step))

    def _end_step(self, step: Step) -> None:
        self.scheduler.register(step)
        self._busy = False
        for scheduled in step.scheduled:
            sequence = scheduled.sequence
            if sequence.num_uncomputed_tokens:
                continue
            sequence.token_ids.append(7)
            name = sequence.request.request_id
            finished = sequence.num_tokens - sequence.num_prompt_tokens >= sequence.request.max_tokens
            if finished:
                self.scheduler.release(sequence)
            deliver = self._deliver.pop(name) if finished else self._deliver[name]
            completion = Completion(index=0, text="", token_ids=[7])
            deliver(GenerationOutput(name, [completion], Usage(1, 1), finished))
        self._start_step()


class Simulation:
    """Engines behind one name, and clients that send the next request when one has ended."""

    def __init__(self, choose: Choice, num_engines: int, num_blocks: int) -> None:
        self.now = 0.0
        self.ttfts: list[float] = []
        self.expected_hits = self.num_prompt_tokens = 0
        config = EngineConfig.from_options("", {"max_num_seqs": 64, "block_size": BLOCK})
        self.engines = [SimulatedEngine(self, config, num_blocks) for _ in range(num_engines)]
        self.group = EngineGroup([cast(AsyncEngine, engine) for engine in self.engines], config)
        self.group.choose = partial(self._choose, choose)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def call_later(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), call))

    def _choose(self, choose: Choice, request: GroupRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        engine = choose(request, engines)
        self.expected_hits += len(request.state.request.prompt_token_ids) - engine.uncached_tokens(request)
        return engine

    def run(self, prompts: Sequence[list[int]], clients: int, *, output: int, warm_up: float = 0) -> None:
        """Run the simulation; the first client begins `warm_up` before the others."""
        waiting = iter(prompts)
        for number in range(clients):
            self.call_later(warm_up if number else 0, partial(self._send_next, waiting, output))
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()
        assert len(self.ttfts) == len(prompts)

    def _send_next(self, waiting: Iterator[list[int]], output: int) -> None:
        prompt = next(waiting, None)
        if prompt is None:
            return
        began, first = self.now, True

        def deliver(received: GenerationOutput) -> None:
            nonlocal first
            if first:
                self.ttfts.append(self.now - began)
                first = False
            if received.finished:
                self._send_next(waiting, output)

        self.num_prompt_tokens += len(prompt)
        name = str(next(self._numbers))
        request = EngineRequest(
            request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(), max_tokens=output
        )
        self.group.submit(RequestState(request, NO_TOKENIZER), cast(Any, deliver))

    @property
    def hit_rate(self) -> float:
        hits = sum(engine.scheduler.kv.prefix_cache.stats.hit_tokens for engine in self.engines)
        return hits / self.num_prompt_tokens

    @property
    def ttft(self) -> float:
        return statistics.mean(self.ttfts)


def round_robin() -> Choice:
    turns = itertools.count()
    return lambda _, engines: engines[next(turns) % len(engines)]


def simulate(
    prompts: list[list[int]], *, num_engines: int = 2, num_blocks: int, **load: Any
) -> tuple[Simulation, Simulation]:
    """Return the same load with Neso's choice and with round robin."""
    own, base = (Simulation(choose, num_engines, num_blocks) for choose in (LeastCost(), round_robin()))
    own.run(prompts, **load)
    base.run(prompts, **load)
    return own, base


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(30_000) for _ in range(count)]


def with_prefixes(count: int, num_prefixes: int, length: int) -> list[list[int]]:
    """Return prompts in random order, each of one of the prefixes and 32 tokens of its own."""
    rng = random.Random(0)
    prefixes = [tokens(rng, length) for _ in range(num_prefixes)]
    prompts = [prefixes[i % num_prefixes] + tokens(rng, 32) for i in range(count)]
    rng.shuffle(prompts)
    return prompts


def test_each_engine_keeps_its_part_of_the_prefixes():
    # 8 prefixes of 32 blocks: a cache holds 5 of them besides the running sequences.
    own, base = simulate(with_prefixes(200, 8, 512), num_blocks=176, clients=4, output=8)
    assert own.hit_rate > 0.85 and base.hit_rate < 0.55
    assert own.ttft < 0.5 * base.ttft and own.now < 0.5 * base.now


def test_prefix_that_is_being_computed_is_worth_waiting_for():
    # Few requests per prefix: each second computation of a prefix is 1.5 % of all prompt tokens.
    own, base = simulate(with_prefixes(32, 8, 512), num_blocks=176, clients=4, output=8)
    assert own.hit_rate > base.hit_rate + 0.2
    assert own.ttft < 0.7 * base.ttft


def test_prefixes_are_divided_between_four_engines():
    own, base = simulate(with_prefixes(300, 32, 512), num_engines=4, num_blocks=448, clients=16, output=32)
    assert own.hit_rate > base.hit_rate + 0.35
    assert own.ttft < 0.5 * base.ttft and own.now < 0.6 * base.now


def test_estimate_of_the_hits_is_close_to_the_hits_of_the_engines():
    own, _ = simulate(with_prefixes(200, 8, 512), num_blocks=176, clients=4, output=8)
    assert abs(own.expected_hits / own.num_prompt_tokens - own.hit_rate) < 0.03


def test_prefix_of_all_requests_gets_to_all_engines():
    # The first client is alone at first, so the prefix is in one cache when the others come.
    own, base = simulate(with_prefixes(300, 1, 2000), num_blocks=2500, clients=16, output=64, warm_up=4000)
    assert own.now < 1.1 * base.now
    for engine in own.engines:
        assert engine.scheduler.kv.prefix_cache.stats.queried_tokens > 0.3 * own.num_prompt_tokens


def test_without_common_prefixes_long_prompts_are_spread():
    rng = random.Random(0)
    prompts = [tokens(rng, rng.choice((32, 100, 300, 1000))) for _ in range(200)]
    own, base = simulate(prompts, num_blocks=700, clients=8, output=16)
    assert own.hit_rate == base.hit_rate == 0
    assert own.ttft < base.ttft and own.now < 1.02 * base.now


def test_without_common_prefixes_short_prompts_do_not_wait_behind_long_ones():
    """As in `bench/replicas.py`; single orders of the prompts differ by chance."""
    ratios = []
    for seed in range(10):
        rng = random.Random(seed)
        prompts = [tokens(rng, rng.choice((32, 64, 256, 512))) for _ in range(96)]
        own, base = simulate(prompts, num_blocks=176, clients=4, output=8)
        ratios.append(base.ttft / own.ttft)
    assert statistics.median(ratios) > 1.1 and min(ratios) > 0.9
