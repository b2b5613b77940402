"""What a model does with the response cache: which requests it answers from it, and which responses go into it."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.response_cache import CachedResponse, Key, ResponseCache, request_key

if TYPE_CHECKING:
    from neso.server.backend import ModelContext
    from neso.server.tracing import ModelTrace

logger = logging.getLogger(__name__)

_loads = itertools.count()


@dataclass(slots=True)
class Miss:
    """A request that was not found, until it has ended. `ns`: the time that was spent on the cache."""

    key: Key
    ns: int
    responses: list[InferenceResponse] = field(default_factory=list)
    failed: bool = False
    trace: ModelTrace | None = None


class CachedModel:
    """One version of a model, as the cache sees it. Belongs to the core's loop."""

    def __init__(self, context: ModelContext, cache: ResponseCache) -> None:
        self._cache = cache
        self._statistics = context.statistics
        # A version that is loaded again may answer otherwise: it does not get what the old one said.
        self._scope = (context.name, context.version, str(next(_loads)))
        self._missed: dict[InferenceRequest, Miss] = {}

    @classmethod
    def of(cls, context: ModelContext) -> CachedModel | None:
        """None for a model whose responses are not cached; says so in the log where the user expects it."""
        if not context.config.response_cache.enable:
            return None
        cache = context.core.response_cache
        reason = "the server has no cache (--cache-config)" if cache is None else ""
        if context.config.model_transaction_policy.decoupled:
            reason = "it is decoupled"
        elif context.config.HasField("sequence_batching"):
            reason = "it is stateful"
        if cache is None or reason:
            logger.warning("model '%s': response_cache has no effect, %s", context.name, reason)
            return None
        return cls(context, cache)

    def find(self, stream: ResponseStream) -> ResponseStream | None:
        """A stream with the response to that one's request, if the cache has it.

        Otherwise `observe` is to see the responses to the request, which has been checked.
        """
        request = stream.request
        # Classes are made of outputs that the key does not tell apart.
        if request.sequence_id or request.classification or not request.cacheable:
            return None
        started = time.monotonic_ns()
        key = request_key(self._scope, request.inputs, request.requested_outputs, request.parameters)
        found = self._cache.get(key)
        outputs = found.copy_outputs() if found is not None else []
        ns = time.monotonic_ns() - started
        if stream.trace is not None:
            kind = "MISS" if found is None else "HIT"
            stream.trace.stamp(f"CACHE_{kind}_LOOKUP_START", started)
            stream.trace.stamp(f"CACHE_{kind}_LOOKUP_END", started + ns)
        if found is None:
            self._missed[request] = Miss(key, ns, trace=stream.trace)
            return None
        name, version = self._scope[:2]
        hit = ResponseStream(request, batch_size=stream.batch_size)
        response = InferenceResponse(name, version, "", outputs, dict(found.parameters), final=True)
        hit.send(response)
        if stream.trace is not None:
            stream.trace.observe(stream.timeline, response)
        self._statistics.record_cache_hit(stream.timeline, ns)
        return hit

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
        if miss.failed:
            return
        started = time.monotonic_ns()
        if len(miss.responses) == 1:
            kept = miss.responses[0]
            self._cache.put(miss.key, CachedResponse.copy_of(kept.outputs, kept.parameters))
        ended = time.monotonic_ns()
        self._statistics.cache_miss.add(miss.ns + ended - started)
        if miss.trace is not None:
            miss.trace.stamp("CACHE_MISS_INSERTION_START", started)
            miss.trace.stamp("CACHE_MISS_INSERTION_END", ended)
