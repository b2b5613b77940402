"""Response caching of one model: looks up requests and stores responses."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.options import ServerOptions
from neso.server.response_cache.cache import FORMAT, CachedResponse, Key, LocalCache, request_key

if TYPE_CHECKING:
    from neso.server.backend import ModelContext
    from neso.server.response_cache.redis import RedisCache
    from neso.server.tracing import ModelTrace

_loads = itertools.count()

K = TypeVar("K")


@dataclass(slots=True)
class CacheMiss(Generic[K]):
    """A cache miss whose request has not ended. `ns`: duration of the lookup."""

    key: K
    ns: int
    responses: list[InferenceResponse] = field(default_factory=list)
    failed: bool = False
    trace: ModelTrace | None = None


class CachedModel(ABC, Generic[K]):
    """Response caching of one model version, with keys of type K. Used on the core's loop.

    `start(stream)` executes a request; `ended(stream)` is called for a request answered from the cache.
    """

    def __init__(
        self,
        context: ModelContext,
        start: Callable[[ResponseStream], None],
        ended: Callable[[ResponseStream], None],
    ) -> None:
        self._name, self._version = context.name, context.version
        self._statistics = context.statistics
        self._start = start
        self._ended = ended
        self._missed: dict[InferenceRequest, CacheMiss[K]] = {}

    def take(self, stream: ResponseStream) -> bool:
        """Return True if the cache answers or starts the request, now or later; False if the caller must start it.

        The request must be validated. `observe` must be called with the responses of all started requests.
        """
        request = stream.request
        # The key does not include the classification.
        if request.sequence_id or request.classification or not request.cacheable:
            return False
        return self._take(stream)

    def observe(self, request: InferenceRequest, response: InferenceResponse) -> None:
        """Observe a response, which is stored when its request has succeeded."""
        miss = self._missed.get(request)
        if miss is None:
            return
        if response.error is not None:
            miss.failed = True
        elif response.outputs:
            miss.responses.append(response)
        if not response.final:
            return
        del self._missed[request]
        if not miss.failed:
            self._keep(miss)

    async def close(self) -> None:
        """Cancel pending operations."""

    def _count(self, miss: CacheMiss[K], started: int) -> None:
        """Record a miss whose response was stored since `started` (ns)."""
        ended = time.monotonic_ns()
        self._statistics.record_cache_miss(miss.ns + ended - started)
        if miss.trace is not None and not miss.trace.ended:
            miss.trace.stamp("CACHE_MISS_INSERTION_START", started)
            miss.trace.stamp("CACHE_MISS_INSERTION_END", ended)

    def _miss(self, stream: ResponseStream, key: K, started: int) -> None:
        """Record a request that was not found; its lookup started at `started` (ns)."""
        ended = time.monotonic_ns()
        self._missed[stream.request] = CacheMiss(key, ended - started, trace=stream.trace)
        if stream.trace is not None:
            stream.trace.stamp("CACHE_MISS_LOOKUP_START", started)
            stream.trace.stamp("CACHE_MISS_LOOKUP_END", ended)

    @abstractmethod
    def _take(self, stream: ResponseStream) -> bool: ...

    @abstractmethod
    def _keep(self, miss: CacheMiss[K]) -> None:
        """Store the response of a successful request, if it is a single one."""

    def _respond(self, stream: ResponseStream, found: CachedResponse, started: int) -> None:
        """Answer from the cache; the lookup started at `started` (ns)."""
        response = InferenceResponse(
            self._name, self._version, "", found.copy_outputs(), dict(found.parameters)
        )
        ns = time.monotonic_ns() - started
        stream.unobserve()  # cache hits have separate statistics
        stream.send(response, final=True)
        self._statistics.record_cache_hit(stream.timeline, ns)
        if stream.trace is not None:
            stream.trace.stamp("CACHE_HIT_LOOKUP_START", started)
            stream.trace.stamp("CACHE_HIT_LOOKUP_END", started + ns)
            stream.trace.observe(stream.timeline, response)
        self._ended(stream)


class LocalCachedModel(CachedModel[Key]):
    """Caching in memory: lookups are synchronous."""

    def __init__(
        self,
        context: ModelContext,
        cache: LocalCache,
        start: Callable[[ResponseStream], None],
        ended: Callable[[ResponseStream], None],
    ) -> None:
        super().__init__(context, start, ended)
        self._cache = cache
        # A reloaded version does not use entries of the previous load.
        self._scope = (context.name, context.version, str(next(_loads)))

    def _take(self, stream: ResponseStream) -> bool:
        request = stream.request
        started = time.monotonic_ns()
        key = request_key(self._scope, request.inputs, request.requested_outputs, request.parameters)
        found = self._cache.get(key)
        if found is None:
            self._miss(stream, key, started)
            return False
        self._respond(stream, found, started)
        return True

    def _keep(self, miss: CacheMiss[Key]) -> None:
        started = time.monotonic_ns()
        if len(miss.responses) == 1:
            kept = miss.responses[0]
            self._cache.put(miss.key, CachedResponse.copy_of(kept.outputs, kept.parameters))
        self._count(miss, started)


logger = logging.getLogger(__name__)

PREFIX = "neso"


class RemoteCachedModel(CachedModel[str]):
    """Caching in Redis. Keys are `neso:<model>:<version>:<hash>`; the hash covers request, configuration and files.

    Servers with the same model share entries, and a changed model does not use entries of the previous one.
    """

    def __init__(
        self,
        context: ModelContext,
        cache: RedisCache,
        start: Callable[[ResponseStream], None],
        ended: Callable[[ResponseStream], None],
    ) -> None:
        super().__init__(context, start, ended)
        self._cache = cache
        self._tasks: set[asyncio.Task[Any]] = set()
        config = context.config.SerializeToString(deterministic=True)
        # In a thread: hashing large files is slow.
        self._fingerprint = self._begin(asyncio.to_thread(fingerprint, config, context.version_directory))

    async def close(self) -> None:
        """Cancel pending lookups and writes."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, stream: ResponseStream) -> bool:
        self._begin(self._look_up(stream))
        stream.request.on_cancel(stream.fail_if_queued)
        return True

    async def _look_up(self, stream: ResponseStream) -> None:
        started = time.monotonic_ns()
        key, found = "", None
        try:
            key = await self._key(stream.request)
            found = await self._cache.get(key)
        except Exception:  # a cache error does not fail the request
            logger.exception("the response cache of model '%s' failed", self._name)
        if stream.closed:  # the request was cancelled, or the model was unloaded
            return
        if found is not None:
            self._respond(stream, found, started)
            return
        if key:
            self._miss(stream, key, started)
        self._start(stream)

    async def _key(self, request: InferenceRequest) -> str:
        scope = (FORMAT, self._name, self._version, await asyncio.shield(self._fingerprint))
        digest = request_key(scope, request.inputs, request.requested_outputs, request.parameters)
        return f"{PREFIX}:{self._name}:{self._version}:{digest.hex()}"

    def _keep(self, miss: CacheMiss[str]) -> None:
        if len(miss.responses) == 1:
            kept = miss.responses[0]
            self._begin(self._put(miss, CachedResponse.copy_of(kept.outputs, kept.parameters)))
        else:
            self._count(miss, time.monotonic_ns())

    async def _put(self, miss: CacheMiss[str], response: CachedResponse) -> None:
        started = time.monotonic_ns()
        try:
            await self._cache.put(miss.key, response)
        except Exception:
            logger.exception("the response cache of model '%s' failed", self._name)
        self._count(miss, started)

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def fingerprint(config: bytes, version_directory: Path) -> str:
    """Return a hash of a configuration and all files of a version. Blocks. Raises `OSError`."""
    digest = hashlib.sha256(hashlib.sha256(config).digest())
    for path in sorted(version_directory.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            # A hash of hashes needs no length prefixes.
            digest.update(hashlib.sha256(str(path.relative_to(version_directory)).encode()).digest())
            digest.update(_hash_of_file(path))
    return digest.hexdigest()


def _hash_of_file(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()


def open_cache(options: ServerOptions) -> LocalCache | RedisCache | None:
    """Open the cache of the server options; None if disabled. Raises `InvalidArgument` if redis is not installed."""
    if options.redis_cache is None:
        return LocalCache(options.response_cache_size) if options.response_cache_size else None
    try:
        from neso.server.response_cache.redis import RedisCache
    except ImportError as error:
        raise InvalidArgument(
            f"a response cache in Redis needs `pip install 'neso-server[redis]'`: {error}"
        ) from None
    return RedisCache(options.redis_cache)


def open_cached_model(
    context: ModelContext,
    start: Callable[[ResponseStream], None],
    ended: Callable[[ResponseStream], None],
) -> CachedModel[Any] | None:
    """Create the response caching of a model; None if disabled. Logs a warning if it is enabled without effect."""
    if not context.config.response_cache.enable:
        return None
    cache = context.core.response_cache
    reason = ""
    if context.config.model_transaction_policy.decoupled:
        reason = "it is decoupled"
    elif context.config.HasField("sequence_batching"):
        reason = "it is stateful"
    elif cache is None:
        reason = "the server has no cache (--cache-config)"
    if cache is None or reason:
        logger.warning("model '%s': response_cache has no effect, %s", context.name, reason)
        return None
    if isinstance(cache, LocalCache):
        return LocalCachedModel(context, cache, start, ended)
    return RemoteCachedModel(context, cache, start, ended)
