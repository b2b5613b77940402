"""What a model does with the response cache: which requests it answers from it, and which responses go into it."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.response_cache.key import Key, request_key
from neso.server.response_cache.local import LocalCache
from neso.server.response_cache.response import CachedResponse

if TYPE_CHECKING:
    from neso.server.backend import ModelContext
    from neso.server.tracing import ModelTrace

_loads = itertools.count()

K = TypeVar("K")


@dataclass(slots=True)
class Miss(Generic[K]):
    """A request that was not found, until it has ended. `ns`: the time that was spent on the cache."""

    key: K
    ns: int
    responses: list[InferenceResponse] = field(default_factory=list)
    failed: bool = False
    trace: ModelTrace | None = None


class CachedModel(ABC, Generic[K]):
    """One version of a model, as a cache with keys of type K sees it. Belongs to the core's loop.

    `start(stream)` has the model execute a request; `ended(stream)` says that one was answered without.
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
        self._missed: dict[InferenceRequest, Miss[K]] = {}

    def take(self, stream: ResponseStream) -> bool:
        """Whether the request of a stream, which has been checked, is answered or started here, now or later.

        If not, it is to be started at once. `observe` is to see the responses of all that are started.
        """
        request = stream.request
        # Classes are made of outputs that the key does not tell apart.
        if request.sequence_id or request.classification or not request.cacheable:
            return False
        return self._take(stream)

    def observe(self, request: InferenceRequest, response: InferenceResponse) -> None:
        """See a response on its way to the client; it is kept once the request has ended well."""
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
        """Leave off what is under way."""

    def _count(self, miss: Miss[K], started: int) -> None:
        """The cache has worked for a request that it did not know, the second time since `started` (ns)."""
        ended = time.monotonic_ns()
        self._statistics.record_cache_miss(miss.ns + ended - started)
        if miss.trace is not None and not miss.trace.ended:
            miss.trace.stamp("CACHE_MISS_INSERTION_START", started)
            miss.trace.stamp("CACHE_MISS_INSERTION_END", ended)

    def _miss(self, stream: ResponseStream, key: K, started: int) -> None:
        """Remember a request that was looked for since `started` (ns), and not found."""
        ended = time.monotonic_ns()
        self._missed[stream.request] = Miss(key, ended - started, trace=stream.trace)
        if stream.trace is not None:
            stream.trace.stamp("CACHE_MISS_LOOKUP_START", started)
            stream.trace.stamp("CACHE_MISS_LOOKUP_END", ended)

    @abstractmethod
    def _take(self, stream: ResponseStream) -> bool: ...

    @abstractmethod
    def _keep(self, miss: Miss[K]) -> None:
        """Put the response of a request that has ended well into the cache, if it is one that can be kept."""

    def _answer(self, stream: ResponseStream, found: CachedResponse, started: int) -> None:
        """Answer from the cache, which has worked since `started` (ns)."""
        response = InferenceResponse(
            self._name, self._version, "", found.copy_outputs(), dict(found.parameters)
        )
        ns = time.monotonic_ns() - started
        stream.unobserve()  # it counts otherwise than a response of the model
        stream.send(response, final=True)
        self._statistics.record_cache_hit(stream.timeline, ns)
        if stream.trace is not None:
            stream.trace.stamp("CACHE_HIT_LOOKUP_START", started)
            stream.trace.stamp("CACHE_HIT_LOOKUP_END", started + ns)
            stream.trace.observe(stream.timeline, response)
        self._ended(stream)


class LocalCachedModel(CachedModel[Key]):
    """With the cache in memory, which answers at once."""

    def __init__(
        self,
        context: ModelContext,
        cache: LocalCache,
        start: Callable[[ResponseStream], None],
        ended: Callable[[ResponseStream], None],
    ) -> None:
        super().__init__(context, start, ended)
        self._cache = cache
        # A version that is loaded again may answer otherwise: it does not get what the old one said.
        self._scope = (context.name, context.version, str(next(_loads)))

    def _take(self, stream: ResponseStream) -> bool:
        request = stream.request
        started = time.monotonic_ns()
        key = request_key(self._scope, request.inputs, request.requested_outputs, request.parameters)
        found = self._cache.get(key)
        if found is None:
            self._miss(stream, key, started)
            return False
        self._answer(stream, found, started)
        return True

    def _keep(self, miss: Miss[Key]) -> None:
        started = time.monotonic_ns()
        if len(miss.responses) == 1:
            kept = miss.responses[0]
            self._cache.put(miss.key, CachedResponse.copy_of(kept.outputs, kept.parameters))
        self._count(miss, started)
