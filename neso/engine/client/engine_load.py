"""The requests in flight of each engine of a group, and the cost of sending another one to it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, TypeVar

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.engine_client import Deliver
from neso.engine.client.output_processor import PooledState, RequestState
from neso.engine.client.prefix_estimate import PrefixEstimate, PrefixKeys
from neso.engine.core.sequence import Sequence as QueuedSequence
from neso.generation import LoraRequest

UNCACHED_COST = 2
"""A prompt token that the engine has to compute for the request counts twice in the comparison of engines.

It takes time now, and its KV cache evicts another prefix, which is computed again later.
"""
SEQUENCE_COST = 32
"""A sequence in flight counts as this many prompt tokens in the comparison of engines."""
ADAPTER_COST = 64
"""An adapter that an engine does not run at present counts as this many prompt tokens."""
QUEUED_STEPS = 2
"""An engine gets prompts for this many steps in advance, so that it never waits for the group."""
_MAX_PREFIXES = 10_000
_additions = count(1)


class RoutedRequest(Protocol):
    """A request for which an engine or a worker is chosen. `keys`: None if prefixes are not cached."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def keys(self) -> PrefixKeys | None: ...
    @property
    def lora(self) -> LoraRequest | None: ...


@dataclass(slots=True, eq=False)
class Load:
    """What an engine or a worker has to do.

    - prefixes: estimate of its prefix cache; num_sequences: of the requests in flight
    - num_prefill_tokens: prompt tokens of requests without an output; adapters: number of requests in flight by adapter
    - last_added: when it got its last request, as a number that grows with each request. Of engines with equal costs,
      the one that has waited longest is chosen
    """

    block_size: int
    prefixes: PrefixEstimate
    num_sequences: int = 0
    num_prefill_tokens: int = 0
    adapters: Counter[str] = field(default_factory=Counter)
    last_added: int = 0

    def uncached_tokens(self, request: RoutedRequest) -> int:
        """Return how many tokens of the prompt would have to be computed."""
        if request.keys is None:
            return request.num_prompt_tokens
        return max(1, request.num_prompt_tokens - self.held_blocks(request.keys) * self.block_size)

    def held_blocks(self, keys: PrefixKeys) -> int:
        """Return how many of the first blocks its prefix cache holds."""
        return self.prefixes.match(keys.keys)

    def cost(self, request: RoutedRequest) -> float:
        """Return the work in front of the request and its own, in prompt tokens."""
        cost = UNCACHED_COST * self.uncached_tokens(request) + self.num_prefill_tokens
        cost += SEQUENCE_COST * self.num_sequences
        if request.lora is not None and request.lora.name not in self.adapters:
            cost += ADAPTER_COST
        return cost

    def add(self, request: RoutedRequest) -> int:
        """Count a request that is sent to the engine. Returns how many prompt tokens it has to compute."""
        num_uncached = self.uncached_tokens(request)
        self.last_added = next(_additions)
        self.num_sequences += request.num_sequences
        self.num_prefill_tokens += num_uncached
        if request.lora is not None:
            self.adapters[request.lora.name] += 1
        if request.keys is not None:
            self.prefixes.add(request.keys.keys)
        return num_uncached

    def remove(self, request: RoutedRequest, num_uncached: int) -> None:
        """Forget a request. `num_uncached`: its prompt tokens that are still counted."""
        self.num_sequences -= request.num_sequences
        self.num_prefill_tokens -= num_uncached
        if request.lora is not None:
            self.adapters[request.lora.name] -= 1
            if not self.adapters[request.lora.name]:
                del self.adapters[request.lora.name]


@dataclass(slots=True, eq=False)
class GroupRequest:
    """A request of a group. `engine`: the engine that executes it; None while it waits.

    - num_uncached: prompt tokens that its engine has to compute, 0 after the first output
    - waiting: its entry in the queue
    """

    state: RequestState | PooledState
    deliver: Deliver
    keys: PrefixKeys | None
    num_sequences: int
    engine: EngineLoad | None = None
    num_uncached: int = 0
    waiting: QueuedSequence | None = None
    deadline: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.state.request.prompt_token_ids)

    @property
    def lora(self) -> LoraRequest | None:
        return self.state.request.lora


class EngineLoad(Load):
    """An engine of a group, and what it has to do. `missed`: changes of adapters since it has ended."""

    def __init__(self, number: int, engine: AsyncEngine, prefixes: PrefixEstimate) -> None:
        super().__init__(engine.info.block_size, prefixes)
        self.number, self.engine = number, engine
        self.missed: list[LoraRequest | str] = []

    def has_room(self, request: RoutedRequest) -> bool:
        """Whether the request could start in one of the next steps."""
        if not self.engine.alive:
            return False
        if not self.num_sequences:
            return True
        info = self.engine.info
        slots = info.max_num_seqs - self.num_sequences
        max_prefill_tokens = QUEUED_STEPS * info.max_num_batched_tokens
        return slots >= request.num_sequences and self.num_prefill_tokens < max_prefill_tokens


AnyLoad = TypeVar("AnyLoad", bound=Load)


class LeastCost:
    """Chooses the engine with the least cost: cached prefixes of the prompt reduce it, other requests add to it.

    A prefix that most requests share would keep them all on one engine, if computing it again costs more than the
    difference between the engines. The differences are therefore summed up per prefix; when the sum reaches the cost of
    computing the prefix, the next request computes it on the engine with the fewest sequences. While the engine of a
    prefix is now more and now less busy than the others, the sum stays small.
    """

    def __init__(self) -> None:
        self._extra_work: OrderedDict[int, int] = OrderedDict()
        """By the key of the first block that the other engine does not hold: work in front of requests beyond that of
        the other engine."""

    def __call__(self, request: RoutedRequest, engines: Sequence[AnyLoad]) -> AnyLoad:
        best = min(engines, key=lambda engine: (engine.cost(request), engine.last_added))
        others = [engine for engine in engines if engine is not best]
        if not others or request.keys is None:
            return best
        other = min(others, key=lambda engine: (engine.num_sequences, engine.last_added))
        keys = request.keys.keys
        held, held_by_other = best.held_blocks(request.keys), other.held_blocks(request.keys)
        if held <= held_by_other:
            return best
        key = keys[held_by_other]
        extra = self._extra_work.pop(key, 0) + SEQUENCE_COST * (best.num_sequences - other.num_sequences)
        if extra > UNCACHED_COST * (held - held_by_other) * best.block_size:
            return other
        if extra > 0:
            self._extra_work[key] = extra
            if len(self._extra_work) > _MAX_PREFIXES:
                self._extra_work.popitem(last=False)
        return best
