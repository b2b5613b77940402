"""Simulated workers behind the production front end, in virtual time: the router, and roles that change.

`ClusterChannel` runs as in a server, with its queue, router, leases and role control. The workers are models of
engines. A step takes step + prompt_token * prompt tokens + sequence * decoding sequences, in seconds. Prompts are
computed in chunks, the prefix cache evicts its oldest blocks, and a transfer takes bytes / link. No second is waited
for. All results are simulated; the ratios compare policies under the same arrivals.

- router: requests that share prefixes; prefix hits and times to the first token of the router, of the router with
  estimated caches, and of round robin. Also the load of each worker for prompts that share nothing, and workers of
  unequal speed.
- remote: prompts computed by a prefill worker or locally by measured times, against a fixed number of tokens; one
  prefill worker that cannot keep up, one that can, and short prompts.
- roles: a load whose prompts and outputs shift; goodput, the part of requests with TTFT and ITL within the targets, of
  changing roles and of every static split.

usage: python bench/cluster_simulation.py [router|remote|roles|all] [--workers 8] [--requests 2000] [--seconds 180]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import selectors
import statistics
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from smoke import parse_arguments

from neso.cluster.front_end import ClusterChannel
from neso.cluster.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Credits,
    Frame,
    FromWorker,
    Grant,
    Hello,
    Report,
    Tell,
    ToWorker,
    encoder,
)
from neso.cluster.router import Choice, Router
from neso.cluster.work_queue import Job, WorkerState
from neso.engine.client.prefix_estimate import PrefixKeys
from neso.engine.cluster_config import DECODE, MIXED, PREFILL, ClusterConfig, Roles
from neso.engine.config import EngineConfig
from neso.engine.core.prefix_keys import BlockJournal
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.stats import EngineStats, KvTransferStats
from neso.engine.ipc.messages import Add, EngineInfo, SendBlockKeys, StepOutputs
from neso.engine.kv_transfer.format import KvFormat
from neso.generation import SamplingParams
from neso.generation.output import FinishReason

BLOCK = 16
BLOCK_BYTES = BLOCK * 128 * 1024  # Llama-3-8B in bfloat16
CHUNK = 1024
"""Prompt tokens of a step."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing is ready."""

    def __init__(self) -> None:
        super().__init__(_NoWait(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _NoWait(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events and timeout:
            self._loop.now += timeout
        return events


@dataclass(frozen=True)
class Speed:
    """Model of a step's time in seconds, and bytes per second of transfers. Values as of an 8B model on one GPU."""

    step: float = 0.008
    prompt_token: float = 0.00008
    sequence: float = 0.0001
    link: float = 10e9


@dataclass
class Arrival:
    """A request of a load. `time`: in seconds."""

    time: float
    prompt: list[int]
    num_outputs: int


@dataclass
class Timing:
    """What a client sees, in seconds."""

    arrived: float
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.arrived

    @property
    def itl(self) -> float:
        return (self.last - self.first) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


@dataclass(eq=False)
class Running:
    """A request in a simulated engine. `ready`: when its transferred blocks have arrived; None: not known yet."""

    grant: Grant
    request: EngineRequest
    keys: list[int]
    left: int = 0
    ready: float | None = 0.0
    num_outputs: int = 0
    started: bool = False


class SimulatedEngine:
    """A worker with a modelled engine, connected to the front end by `SimulatedSocket`."""

    def __init__(self, name: str, network: Network, num_blocks: int, speed: Speed, roles: Roles) -> None:
        self.name, self.network, self.speed, self.roles = name, network, speed, roles
        self.info = msgspec.structs.replace(
            EngineInfo("simulated", 32768, 64, 128256, num_blocks, BLOCK, 0, 0.0),
            kv_address=name,
            kv_format=FORMAT,
        )
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.journal = BlockJournal()
        self.reporting = False
        self.running: dict[tuple[str, int], Running] = {}
        self.num_grants = 0
        self.hits = self.queried = 0
        self.transfers = KvTransferStats()
        self.busy = 0.0
        self._wake = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def hello(self) -> None:
        self.send(Hello(PROTOCOL_VERSION, self.name, "", 0, "", self.info, self.roles))
        self.report([])

    def send(self, message: FromWorker) -> None:
        self.network.socket.deliver(self.name, encoder.encode(message))

    def close(self) -> None:
        self._task.cancel()

    def receive(self, message: ToWorker) -> None:
        match message:
            case Grant():
                self.num_grants += 1
                self._start(message)
            case Cancel(request_id, attempt):
                self.running.pop((request_id, attempt), None)
            case Tell(SendBlockKeys()):
                self.reporting = True
                self.report([], complete=True)

    def _start(self, grant: Grant) -> None:
        request = msgspec.msgpack.decode(grant.request, type=EngineRequest)
        one = Running(grant, request, PrefixKeys(request, BLOCK).keys)
        one.left = self._uncached(one, count=request.kv_import is None)
        if request.kv_import is not None:
            one.ready = None
            self.network.imports[request.kv_import.transfer_id] = (self, one)
        self.running[grant.request_id, grant.attempt] = one
        self._wake.set()

    def _uncached(self, one: Running, *, count: bool) -> int:
        found = 0
        for key in one.keys:
            if key not in self.cache:
                break
            self.cache.move_to_end(key)
            found += 1
        total = len(one.request.prompt_token_ids)
        if count:
            self.queried += total
            self.hits += min(found * BLOCK, total - 1)
        return max(1, total - found * BLOCK)

    def store(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            if key not in self.cache:
                self.journal.add(key)
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > self.info.num_blocks:
            self.journal.remove(self.cache.popitem(last=False)[0])

    def imported(self, one: Running, at: float) -> None:
        """The prompt is computed elsewhere: its missing blocks are copied."""
        num_bytes = one.left / BLOCK * BLOCK_BYTES
        seconds = num_bytes / self.speed.link
        self.transfers.imported_bytes += int(num_bytes)
        self.transfers.import_seconds += seconds
        one.left, one.ready = 1, at + seconds
        asyncio.get_running_loop().call_at(one.ready, self._wake.set)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            ready = [one for one in self.running.values() if one.ready is not None and one.ready <= now]
            if not ready:
                self._wake.clear()
                await self._wake.wait()
                continue
            budget = CHUNK
            chunks: list[tuple[Running, int]] = []
            for one in ready:
                if one.left and budget:
                    chunks.append((one, min(one.left, budget)))
                    budget -= chunks[-1][1]
            decoding = [one for one in ready if not one.left]
            seconds = self.speed.step + self.speed.prompt_token * (CHUNK - budget)
            seconds += self.speed.sequence * len(decoding)
            self.busy += seconds
            await asyncio.sleep(seconds)
            frames = [frame for one in decoding if (frame := self._token(one))]
            for one, tokens in chunks:
                one.left -= tokens
                if not one.left and (frame := self._computed(one)):
                    frames.append(frame)
            self.report(frames)

    def _computed(self, one: Running) -> Frame | None:
        if (one.grant.request_id, one.grant.attempt) not in self.running:
            return None
        one.started = True
        self.store(one.keys)
        export = one.request.kv_export
        if export is None:
            return self._token(one)
        del self.running[one.grant.request_id, one.grant.attempt]
        reader = self.network.imports.pop(export.transfer_id, None)
        if reader is not None:
            reader[0].imported(reader[1], asyncio.get_running_loop().time())
        output = SequenceOutput(
            request_id=one.grant.request_id,
            index=0,
            token_ids=[],
            finish_reason=FinishReason.LENGTH,
            exported_tokens=len(one.keys) * BLOCK or 1,
        )
        return Frame(one.grant.attempt, 0, output)

    def _token(self, one: Running) -> Frame | None:
        if (one.grant.request_id, one.grant.attempt) not in self.running:
            return None
        start = one.num_outputs
        one.num_outputs += 1
        finished = one.num_outputs >= one.request.max_tokens
        if finished:
            del self.running[one.grant.request_id, one.grant.attempt]
        reason = FinishReason.LENGTH if finished else None
        output = SequenceOutput(request_id=one.grant.request_id, index=0, token_ids=[7], finish_reason=reason)
        return Frame(one.grant.attempt, start, output)

    def report(self, frames: list[Frame], *, complete: bool = False) -> None:
        used = sum(one.grant.cost.blocks for one in self.running.values())
        waiting = sum(one.grant.cost.prefill_tokens for one in self.running.values() if not one.started)
        credits = Credits(
            sequences=self.info.max_num_seqs - len(self.running),
            blocks=self.info.num_blocks - used,
            prefill_tokens=2 * CHUNK - waiting,
            grants=self.num_grants,
            idle=not self.running,
        )
        changes = self.journal.snapshot() if complete else self.journal.take() if self.reporting else None
        stats = EngineStats(num_blocks=self.info.num_blocks, kv_transfer=self.transfers.copy())
        self.send(Report(credits, stats, frames, [changes] if changes else []))


FORMAT = KvFormat(
    model="", layout="", dtype="bfloat16", block_size=BLOCK, num_parts=1, part_bytes=BLOCK_BYTES
)


class SimulatedSocket:
    """The front end's socket: messages are delivered at once."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._incoming: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    async def receive(self) -> tuple[str, bytes]:
        return await self._incoming.get()

    def deliver(self, name: str, data: bytes) -> None:
        self._incoming.put_nowait((name, data))

    def send(self, name: str, message: ToWorker) -> bool:
        asyncio.get_running_loop().call_soon(self._network.engines[name].receive, message)
        return True

    def close(self) -> None:
        pass


class Network:
    """All simulated workers, and the transfers that wait for their prompts."""

    def __init__(self) -> None:
        self.socket = SimulatedSocket(self)
        self.engines: dict[str, SimulatedEngine] = {}
        self.imports: dict[str, tuple[SimulatedEngine, Running]] = {}


@dataclass
class Result:
    """Of a run: timings by request, and per worker the part of time in which it worked and its prompt tokens."""

    timings: list[Timing] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    hit_rate: float = 0.0
    role_changes: int = 0

    @property
    def ttft(self) -> float:
        return statistics.fmean(one.ttft for one in self.timings)

    @property
    def balance(self) -> float:
        """Work of the busiest worker by that of the least busy one."""
        return max(self.busy) / min(self.busy)

    def goodput(self, ttft: float, itl: float) -> float:
        """Part of the requests within both targets."""
        return sum(one.ttft <= ttft and one.itl <= itl for one in self.timings) / len(self.timings)


def simulate(
    arrivals: Sequence[Arrival],
    roles: Sequence[Roles],
    *,
    num_blocks: int,
    config: ClusterConfig,
    router: Router | None = None,
    speeds: Sequence[Speed] = (),
) -> Result:
    """Run a load on workers with these roles."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_simulate(arrivals, roles, num_blocks, config, router, speeds))
    finally:
        loop.close()


async def _simulate(
    arrivals: Sequence[Arrival],
    roles: Sequence[Roles],
    num_blocks: int,
    config: ClusterConfig,
    router: Router | None,
    speeds: Sequence[Speed],
) -> Result:
    loop = asyncio.get_running_loop()
    network = Network()
    options = EngineConfig(model="simulated", cluster=config, heartbeat_timeout=0)
    channel = ClusterChannel(options, "", [network.socket])  # type: ignore[list-item]
    if router is not None:
        channel._router = router
    for number, role in enumerate(roles):
        speed = speeds[number] if speeds else Speed()
        name = f"w{number}"
        network.engines[name] = SimulatedEngine(name, network, num_blocks, speed, role)
        network.engines[name].hello()
    await channel.connections.first_worker()
    timings: dict[str, Timing] = {}

    async def receive() -> None:
        left = len(arrivals)
        while left:
            event = await channel.receive()
            for output in event.outputs if isinstance(event, StepOutputs) else ():
                timing = timings[output.request_id]
                assert not output.error, output.error
                timing.first = timing.first or loop.time()
                timing.last = loop.time()
                timing.num_tokens += len(output.token_ids)
                left -= output.finish_reason is not None

    receiving = asyncio.create_task(receive())
    for number, arrival in enumerate(arrivals):
        await asyncio.sleep(max(0.0, arrival.time - loop.time()))
        request = EngineRequest(
            request_id=str(number),
            prompt_token_ids=arrival.prompt,
            sampling=SamplingParams(seed=1),
            max_tokens=arrival.num_outputs,
        )
        timings[str(number)] = Timing(loop.time())
        channel.send(Add(request))
    await receiving
    engines = network.engines.values()
    result = Result([*timings.values()], [engine.busy for engine in engines])
    queried = sum(engine.queried for engine in engines)
    result.hit_rate = sum(engine.hits for engine in engines) / max(1, queried)
    result.role_changes = channel.counters.role_changes
    for engine in engines:
        engine.close()
    await channel.close(0)
    return result


# -- the router -------------------------------------------------------------------------------------------------


class RoundRobin(Router):
    """The baseline: each request goes to the next worker, and waits for it if it is full."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def choose(self, window: Sequence[Job], workers: Sequence[WorkerState], now: float) -> Choice:
        if not window or not workers:
            return Choice()
        worker = workers[self._next % len(workers)]
        if not worker.has_room(window[0]):
            return Choice()
        self._next += 1
        return Choice(window[0], worker)


def shared_prefixes(count: int, rate: float, num_prefixes: int, rng: random.Random) -> list[Arrival]:
    """Requests of 2,048 shared and 128 own prompt tokens; some prefixes are more popular than others."""
    prefixes = [[rng.randrange(100_000) for _ in range(2048)] for _ in range(num_prefixes)]
    weights = [1 / (1 + number) ** 0.7 for number in range(num_prefixes)]
    time, arrivals = 0.0, []
    for _ in range(count):
        time += rng.expovariate(rate)
        (prefix,) = rng.choices(prefixes, weights)
        arrivals.append(Arrival(time, [*prefix, *(rng.randrange(100_000) for _ in range(128))], 32))
    return arrivals


def single_turns(count: int, rate: float, rng: random.Random) -> list[Arrival]:
    """Prompts of 256 to 1,024 tokens that share nothing."""
    time, arrivals = 0.0, []
    for _ in range(count):
        time += rng.expovariate(rate)
        length = rng.randrange(256, 1024)
        arrivals.append(Arrival(time, [rng.randrange(100_000) for _ in range(length)], 32))
    return arrivals


def compare_routers(num_workers: int, num_requests: int) -> None:
    rng = random.Random(1)
    num_prefixes = 8 * num_workers
    arrivals = shared_prefixes(num_requests, 4.0 * num_workers, num_prefixes, rng)
    num_blocks = 2 * num_prefixes * 2048 // BLOCK // num_workers  # each worker holds a part of the prefixes
    once = num_prefixes * 2048
    best = 1 - (once + num_requests * 128) / (num_requests * (2048 + 128))
    mixed = [MIXED] * num_workers
    tracked, estimated = ClusterConfig(workers=1), ClusterConfig(workers=1, max_tracked_blocks=0)
    cases: dict[str, tuple[ClusterConfig, Router | None]] = {
        "round robin": (tracked, RoundRobin()),
        "router, estimated caches": (estimated, None),
        "router": (tracked, None),
    }
    print(
        f"{num_workers} workers, {num_requests} requests, {num_prefixes} prefixes of 2,048 tokens (simulated)"
    )
    print(f"each prefix computed once: {best:.1%} of the prompt tokens are hits")
    results = {}
    for name, (config, router) in cases.items():
        result = simulate(arrivals, mixed, num_blocks=num_blocks, config=config, router=router)
        results[name] = result
        print(f"{name:26} hits {result.hit_rate:6.1%}   mean TTFT {1000 * result.ttft:8.1f} ms   ", end="")
        print(f"busiest/least busy {result.balance:.2f}")
    ratio = results["round robin"].ttft / results["router"].ttft
    print(f"mean TTFT of round robin / router: {ratio:.2f}")
    for rate, name in ((0.5, "one at a time"), (4.0 * num_workers, "loaded")):
        alone = single_turns(num_requests // 2, rate, rng)
        result = simulate(alone, mixed, num_blocks=num_blocks, config=tracked)
        print(f"prompts that share nothing, {name:14} busiest/least busy {result.balance:.2f}")
    half = Speed(step=0.016, prompt_token=0.00016, sequence=0.0002)
    speeds = [Speed()] * (num_workers - num_workers // 2) + [half] * (num_workers // 2)
    loaded = single_turns(num_requests, 6.0 * num_workers, rng)
    for name, router in (("round robin", RoundRobin()), ("router", None)):
        result = simulate(loaded, mixed, num_blocks=num_blocks, config=tracked, router=router, speeds=speeds)
        print(f"half of the workers at half speed, {name:12} mean TTFT {1000 * result.ttft:8.1f} ms")


# -- where prompts are computed ---------------------------------------------------------------------------------

TTFT_TARGET, ITL_TARGET = 1.0, 0.015


def steady_load(seconds: float, rate: float, prompt: int, outputs: int, rng: random.Random) -> list[Arrival]:
    """Requests of half to one and a half times as many tokens. `rate`: requests per second."""
    time, arrivals = 0.0, []
    while time < seconds:
        time += rng.expovariate(rate)
        tokens = [rng.randrange(100_000) for _ in range(int(prompt * rng.uniform(0.5, 1.5)))]
        arrivals.append(Arrival(time, tokens, int(outputs * rng.uniform(0.5, 1.5))))
    return arrivals


def compare_remote(num_workers: int, seconds: float) -> None:
    """One prefill worker, the others decode. A prompt of 1,000 tokens takes 0.09 s."""
    loads = {
        "overloaded prefill worker": (16.0, 1000, 100),
        "prefill worker that keeps up": (7.0, 1000, 100),
        "short prompts": (30.0, 60, 100),
    }
    roles = [PREFILL] + [DECODE] * (num_workers - 1)
    policies = {"all remote": 1, "fixed, 256 tokens": 256, "measured times": None}
    print(f"1 prefill worker, {num_workers - 1} decode workers (simulated)")
    for name, (rate, prompt, outputs) in loads.items():
        arrivals = steady_load(seconds, rate, prompt, outputs, random.Random(3))
        goodputs = {}
        for policy, number in policies.items():
            config = ClusterConfig(workers=1, min_remote_prefill=number)
            result = simulate(arrivals, roles, num_blocks=20_000, config=config)
            goodputs[policy] = result.goodput(TTFT_TARGET, ITL_TARGET)
            itl = 1000 * statistics.fmean(one.itl for one in result.timings)
            print(f"{name:30} {policy:18} goodput {goodputs[policy]:6.1%}   ", end="")
            print(f"mean TTFT {1000 * result.ttft:8.1f} ms   mean ITL {itl:5.2f} ms")
        ratio = goodputs["measured times"] / max(goodputs["fixed, 256 tokens"], 1e-9)
        print(f"{name:30} goodput of measured times / fixed: {ratio:.2f}")


# -- roles ------------------------------------------------------------------------------------------------------


def shifting_load(seconds: float, scale: float, rng: random.Random) -> list[Arrival]:
    """Phases of long prompts with short outputs, short prompts with long outputs, and long prompts again."""
    time, arrivals = 0.0, []
    phases = ((7.0, 4000, 40), (12.0, 400, 700), (7.0, 4000, 40))
    while time < seconds:
        rate, prompt, outputs = phases[min(2, int(3 * time / seconds))]
        time += rng.expovariate(rate * scale)
        length = int(prompt * rng.uniform(0.5, 1.5))
        tokens = [rng.randrange(100_000) for _ in range(length)]
        arrivals.append(Arrival(time, tokens, int(outputs * rng.uniform(0.5, 1.5))))
    return arrivals


def compare_roles(num_workers: int, seconds: float) -> None:
    arrivals = shifting_load(seconds, num_workers / 4, random.Random(2))
    targets = ClusterConfig(workers=1, ttft_target=TTFT_TARGET, itl_target=ITL_TARGET, role_period=2.0)
    static = ClusterConfig(workers=1)
    print(f"{num_workers} workers, {len(arrivals)} requests in {seconds:.0f} s (simulated)")
    print(f"goodput: requests with TTFT <= {TTFT_TARGET:g} s and ITL <= {1000 * ITL_TARGET:g} ms")
    best = 0.0
    for prefill in range(num_workers):
        decode = num_workers - prefill
        roles = [PREFILL] * prefill + [DECODE] * decode if prefill else [MIXED] * num_workers
        result = simulate(arrivals, roles, num_blocks=20_000, config=static)
        goodput = result.goodput(TTFT_TARGET, ITL_TARGET)
        best = max(best, goodput)
        name = f"{prefill} prefill, {decode} decode" if prefill else "all mixed (chunked prefill)"
        print(f"static: {name:28} {goodput:6.1%}   mean TTFT {1000 * result.ttft:8.0f} ms")
    half = num_workers // 2
    roles = [PREFILL] * half + [DECODE] * (num_workers - half)
    result = simulate(arrivals, roles, num_blocks=20_000, config=targets)
    goodput = result.goodput(TTFT_TARGET, ITL_TARGET)
    print(f"changing roles, {result.role_changes} changes{'':12} {goodput:6.1%}   ", end="")
    print(f"mean TTFT {1000 * result.ttft:8.0f} ms")
    print(f"changing roles / best static split: {goodput / max(best, 1e-9):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="all", choices=("router", "remote", "roles", "all"))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--role-workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=180.0, help="simulated time of the shifting load")
    options = parse_arguments(parser, workers=3, requests=60, role_workers=3, seconds=12.0)
    if options.what in ("router", "all"):
        compare_routers(options.workers, options.requests)
    if options.what in ("remote", "all"):
        compare_remote(options.role_workers, options.seconds / 3)
    if options.what in ("roles", "all"):
        compare_roles(options.role_workers, options.seconds)


if __name__ == "__main__":
    main()
