"""The engines of a model: one queue, and the choice of the engine for each request."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.async_requests import AsyncRequests
from neso.engine.client.engine_client import Deliver, Output, load_engine_tokenizer
from neso.engine.client.engine_load import EngineLoad, GroupRequest, LeastCost
from neso.engine.client.output_processor import PooledState, RequestState
from neso.engine.client.prefix_estimate import PrefixEstimate, PrefixKeys
from neso.engine.config import EngineConfig
from neso.engine.core.admission import QueueFull, WaitingQueue, expiry_message
from neso.engine.core.sequence import Sequence as QueuedSequence
from neso.engine.core.stats import EngineStats
from neso.engine.errors import EngineBusy, EngineDead, EngineError
from neso.engine.ipc.messages import EngineInfo
from neso.engine.placement import place_engines
from neso.engine.text.tokenizer import EngineTokenizer
from neso.generation import (
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    LoraRequest,
    PoolingRequest,
)

_MAX_SOURCES = 10_000


class EngineGroup(AsyncRequests):
    """A `LanguageModel` and `PoolingModel` on one or more equal engines.

    With several engines, a request waits here, in the order of `WaitingQueue`, until an engine has room for it;
    `choose` selects the engine. A group with one engine passes requests on, and the engine has the queue.

    When an engine ends, its requests fail with `EngineDead`, and the others continue; requests in the queue fail only
    if no engine is left.
    """

    def __init__(self, engines: Sequence[AsyncEngine], config: EngineConfig) -> None:
        self.engines = tuple(engines)
        self.info = sum_info([engine.info for engine in engines])
        self.choose: Callable[[GroupRequest, Sequence[EngineLoad]], EngineLoad] = LeastCost()
        self._loads = [
            EngineLoad(number, engine, PrefixEstimate(engine.info.num_blocks))
            for number, engine in enumerate(engines)
        ]
        scheduler = config.scheduler
        self._queue = WaitingQueue(scheduler.max_queue_size, scheduler.priority_ageing_seconds)
        self._requests: dict[str, GroupRequest] = {}
        self._waiting: dict[int, GroupRequest] = {}  # by the id of the entry in the queue
        self._num_queued = 0
        self._lora_sources: OrderedDict[str, EngineLoad] = OrderedDict()
        self._dead_callbacks: list[Callable[[int, str], None]] = []
        for load in self._loads:
            load.engine.on_dead(partial(self._on_dead, load))

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        count: int = 1,
        *,
        gpus: Sequence[str] = (),
        in_process: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> EngineGroup:
        """Start `count` engines and wait until all have loaded the model. Raises `EngineError` if one cannot.

        - gpus: the GPUs that are divided between the engines, see `place_engines`
        - share: number of this group, and number of equal groups in processes of this host, which share its devices
        """
        number, groups = share
        try:
            configs = place_engines(config, count * groups, gpus)[count * number : count * (number + 1)]
        except ValueError as error:
            raise EngineError(str(error)) from None
        if count > 1:  # the group has the queue
            unlimited = msgspec.structs.replace(config.scheduler, max_queue_size=None)
            configs = [msgspec.structs.replace(placed, scheduler=unlimited) for placed in configs]
        # Load the tokenizer while the engine processes load the weights.
        loading = asyncio.ensure_future(asyncio.to_thread(load_engine_tokenizer, config))
        starting = [
            asyncio.ensure_future(AsyncEngine.start(placed, in_process=in_process, tokenizer=loading))
            for placed in configs
        ]
        try:
            engines = await asyncio.gather(*starting)
        except BaseException:
            for start in starting:
                start.cancel()
            results = await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(result.stop(0) for result in results if isinstance(result, AsyncEngine)))
            raise
        return cls(engines, config)

    # -- properties ---------------------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        """Sums over the engines, and the requests in the queue."""
        stats = EngineStats.sum([engine.stats for engine in self.engines])
        queued = len(self._queue)
        if not queued:
            return stats
        return msgspec.structs.replace(
            stats, num_requests=stats.num_requests + queued, num_waiting=stats.num_waiting + queued
        )

    @property
    def num_queued(self) -> int:
        """Number of requests that wait for an engine with room."""
        return len(self._queue)

    @property
    def alive(self) -> bool:
        """Whether an engine is running and accepts requests."""
        return any(engine.alive for engine in self.engines)

    @property
    def text(self) -> EngineTokenizer:
        return self._smallest.text

    @property
    def _smallest(self) -> AsyncEngine:
        """The engine with the shortest context: its requests fit all engines."""
        return min(self.engines, key=lambda engine: engine.max_model_len)

    # -- requests -----------------------------------------------------------------------------------------------

    def process(self, request: GenerationRequest | PoolingRequest) -> RequestState | PooledState:
        return self._smallest.process(request)

    def submit(self, state: RequestState | PooledState, deliver: Deliver) -> None:
        """Send a request to an engine, or queue it.

        Raises `EngineDead`, `EngineBusy` if the queue is full, `InvalidParameter` for a duplicate id.
        """
        if len(self.engines) == 1:
            self.engines[0].submit(state, deliver)
            return
        self._check_alive()
        name = state.request.request_id
        if name in self._requests:
            raise InvalidParameter("request_id", f"'{name}' is in flight already")
        pooled = isinstance(state, PooledState)
        keys = None
        if self.engines[0].info.enable_prefix_caching and self.engines[0].info.num_blocks:
            keys = PrefixKeys(state.request, self.engines[0].info.block_size)
        num_sequences = 1 if pooled else state.request.sampling.num_sequences
        request = GroupRequest(state, deliver, keys, num_sequences)
        self._requests[name] = request
        try:
            engine = None if self._queue else self._engine_for(request)
            if engine is not None:
                self._send(request, engine)
            else:
                self._enqueue(request)
        except Exception:
            self._requests.pop(name, None)
            raise

    def abort(self, state: RequestState | PooledState) -> None:
        """Abort a request; does nothing if it is not in flight."""
        if len(self.engines) == 1:
            self.engines[0].abort(state)
            return
        request = self._requests.get(state.request.request_id)
        if request is None or request.state is not state:
            return
        if request.engine is not None:
            request.engine.engine.abort(state)
        self._release(request)
        self._send_waiting()

    def _engine_for(self, request: GroupRequest) -> EngineLoad | None:
        """Return the engine for a request; None if no engine has room."""
        engines = [load for load in self._candidates(request) if load.has_room(request)]
        return self.choose(request, engines) if engines else None

    def _candidates(self, request: GroupRequest) -> Sequence[EngineLoad]:
        """Return the engines that can execute the request: if it has no source of its adapter, those that have it."""
        lora = request.lora
        if lora is None or lora.path is not None or lora.tensors is not None:
            return self._loads
        having = [load for load in self._loads if lora.name in load.engine.list_loras()]
        if not having and lora.name in self._lora_sources:
            having = [self._lora_sources[lora.name]]
        having = [load for load in having if load.engine.alive]
        return having or self._loads

    def _send(self, request: GroupRequest, load: EngineLoad) -> None:
        state, lora = request.state, request.lora
        request.engine, request.num_uncached = load, load.add(request)
        if lora is not None and (lora.path is not None or lora.tensors is not None):
            self._remember_source(lora.name, load)
        try:
            load.engine.submit(state, partial(self._receive, request))
        except Exception:
            self._release(request)
            raise

    def _remember_source(self, name: str, load: EngineLoad) -> None:
        self._lora_sources[name] = load
        self._lora_sources.move_to_end(name)
        if len(self._lora_sources) > _MAX_SOURCES:
            self._lora_sources.popitem(last=False)

    def _receive(self, request: GroupRequest, output: Output | Exception) -> None:
        """Pass on an output of an engine."""
        load = request.engine
        if load is not None and request.num_uncached:
            load.num_prefill_tokens -= request.num_uncached
            request.num_uncached = 0
        ended = True
        if isinstance(output, GenerationOutput):
            ended = output.finished
            if request.keys is not None and request.num_sequences == 1:
                for delta in output.deltas:
                    request.keys.extend(delta.token_ids)
        if ended:
            if load is not None and request.keys is not None and not isinstance(output, Exception):
                load.prefixes.add(request.keys.keys)
            self._release(request)
        request.deliver(output)
        if self._queue:
            self._send_waiting()

    def _release(self, request: GroupRequest) -> None:
        """Forget an ended request."""
        if self._requests.pop(request.state.request.request_id, None) is None:
            return
        if request.waiting is not None:
            self._dequeue(request)
        if request.engine is not None:
            request.engine.remove(request, request.num_uncached)
            request.engine = None

    # -- the queue ----------------------------------------------------------------------------------------------

    def _enqueue(self, request: GroupRequest) -> None:
        try:
            self._queue.check_room()
        except QueueFull as error:
            raise EngineBusy(str(error)) from None
        self._num_queued += 1
        data = request.state.request
        rank = self._queue.rank(data.priority, data.queue_delay)
        entry = QueuedSequence(id=self._num_queued, request=data, arrival=self._num_queued, rank=rank)
        request.waiting = entry
        self._waiting[entry.id] = request
        self._queue.add(entry)
        if data.queue_timeout_ms is not None:
            loop, seconds = asyncio.get_running_loop(), data.queue_timeout_ms / 1000
            request.deadline = loop.time() + seconds
            loop.call_later(seconds, self._fail_expired)

    def _dequeue(self, request: GroupRequest) -> None:
        entry, request.waiting = request.waiting, None
        assert entry is not None
        self._queue.remove(entry)
        del self._waiting[entry.id]

    def _send_waiting(self) -> None:
        """Send waiting requests to engines with room, in order.

        A request for which no engine has room holds up those behind it, unless it needs an engine with its adapter.
        """
        for entry in tuple(self._queue):
            request = self._waiting.get(entry.id)
            if request is None:
                continue  # aborted by the error of another request
            engine = self._engine_for(request)
            if engine is not None:
                self._dequeue(request)
                self._limit_wait(request)
                self._deliver_errors(request, partial(self._send, request, engine))
            elif self._candidates(request) is self._loads:
                return

    @staticmethod
    def _limit_wait(request: GroupRequest) -> None:
        """Leave the rest of its time in the queue to the engine."""
        if request.deadline is not None:
            rest = (request.deadline - asyncio.get_running_loop().time()) * 1000
            state = request.state
            state.request = msgspec.structs.replace(state.request, queue_timeout_ms=max(rest, 0.001))

    def _deliver_errors(self, request: GroupRequest, send: Callable[[], None]) -> None:
        try:
            send()
        except (EngineError, InvalidParameter) as error:
            self._release(request)
            request.deliver(error)

    def _fail_expired(self) -> None:
        for entry in self._queue.expired():
            request = self._waiting[entry.id]
            self._release(request)
            request.deliver(EngineBusy(expiry_message(entry.request)))

    # -- the ends of engines ------------------------------------------------------------------------------------

    def on_dead(self, callback: Callable[[int, str], None]) -> None:
        """Call `callback(number, reason)` when an engine ends unexpectedly, before requests fail because of it."""
        self._dead_callbacks.append(callback)

    def _on_dead(self, load: EngineLoad, reason: str) -> None:
        for callback in self._dead_callbacks:
            callback(load.number, reason)
        load.prefixes.clear()
        if self.alive:
            self._send_waiting()
            return
        for request in tuple(self._waiting.values()):
            self._release(request)
            request.deliver(EngineDead(reason))

    async def restart(self, number: int) -> EngineInfo:
        """Start an engine again after it has ended; see `AsyncEngine.restart`. Raises `EngineError`."""
        load = self._loads[number]
        info = await load.engine.restart()
        self.info = sum_info([engine.info for engine in self.engines])
        missed, load.missed = load.missed, []
        await load.engine.catch_up(missed)
        load.prefixes = PrefixEstimate(info.num_blocks)
        self._send_waiting()
        return info

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineDead("the engine process has ended")

    async def stop(self, timeout: float = 5.0) -> None:
        """Stop the engines; requests in flight and in the queue fail with `EngineDead`."""
        await asyncio.gather(*(engine.stop(timeout) for engine in self.engines))
        for request in tuple(self._waiting.values()):
            self._release(request)
            request.deliver(EngineDead("the engine process has ended"))

    async def check_integrity(self) -> EngineStats:
        """Check the KV-cache accounting of all engines. Raises `EngineError` if it is inconsistent or one has ended."""
        await asyncio.gather(*(engine.check_integrity() for engine in self.engines))
        return self.stats

    # -- adapters -----------------------------------------------------------------------------------------------

    def list_loras(self) -> dict[str, str | None]:
        """Return the names of the adapters of all engines, each with the path it was loaded from, if any."""
        names: dict[str, str | None] = {}
        for engine in self.engines:
            names |= engine.list_loras()
        return names

    async def load_lora(self, lora: LoraRequest) -> None:
        """Load an adapter in all engines, or in none: an adapter that it replaces is then loaded again.

        Raises `EngineError`.
        """
        self._check_alive()
        before = self.list_loras()
        done, errors = await self._change_all(lora, lambda engine: engine.load_lora(lora))
        if not errors:
            return
        path = before.get(lora.name)
        for load in done:
            if lora.name not in before:
                await _ignoring_errors(load.engine.unload_lora(lora.name))
            elif path is not None:
                await _ignoring_errors(load.engine.load_lora(LoraRequest(name=lora.name, path=path)))
        raise errors[0]

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter from all engines. Raises `EngineError` if none has it."""
        self._check_alive()
        done, errors = await self._change_all(name, lambda engine: engine.unload_lora(name))
        self._lora_sources.pop(name, None)
        if not done:
            raise errors[0]

    async def _change_all(
        self, change: LoraRequest | str, apply: Callable[[AsyncEngine], Awaitable[None]]
    ) -> tuple[list[EngineLoad], list[EngineError]]:
        """Change an adapter in all engines. Returns those that have changed it, and the errors of the others.

        An engine that is not running makes the change after its restart.
        """

        async def change_one(load: EngineLoad) -> EngineError | None:
            try:
                await apply(load.engine)
            except EngineDead:
                dead.append(load)
            except EngineError as error:
                return error
            else:
                done.append(load)
            return None

        done: list[EngineLoad] = []
        dead: list[EngineLoad] = []
        results = await asyncio.gather(*map(change_one, self._loads))
        errors = [error for error in results if error is not None]
        if not done and not errors:
            errors.append(EngineDead("the engine process has ended"))
        for load in dead if done else ():
            load.missed.append(change)
        return done, errors


async def _ignoring_errors(change: Awaitable[None]) -> None:
    with suppress(EngineError):
        await change


def sum_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Return the properties of a model; the sizes are sums over its engines, except the token budget of a step."""
    if len(infos) == 1:
        return infos[0]
    return msgspec.structs.replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        max_num_seqs=sum(info.max_num_seqs for info in infos),
        num_blocks=sum(info.num_blocks for info in infos),
        cache_bytes=sum(info.cache_bytes for info in infos),
        load_seconds=max(info.load_seconds for info in infos),
    )
