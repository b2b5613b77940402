"""The requests in flight of each engine of a group, and the cost of sending another one to it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

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
_MAX_PREFIXES = 10_000


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
    def lora(self) -> LoraRequest | None:
        return self.state.request.lora


@dataclass(slots=True, eq=False)
class EngineLoad:
    """An engine of a group, and what it has to do.

    - num_sequences: of the requests in flight; num_prefill_tokens: prompt tokens of requests without an output
    - adapters: number of requests in flight by adapter
    - missed: changes of adapters since it has ended
    """

    number: int
    engine: AsyncEngine
    prefixes: PrefixEstimate
    num_sequences: int = 0
    num_prefill_tokens: int = 0
    adapters: Counter[str] = field(default_factory=Counter)
    missed: list[LoraRequest | str] = field(default_factory=list)

    def has_room(self, request: GroupRequest, max_prefill_tokens: int) -> bool:
        """Whether the request could start in one of the next steps."""
        if not self.engine.alive:
            return False
        if not self.num_sequences:
            return True
        slots = self.engine.info.max_num_seqs - self.num_sequences
        return slots >= request.num_sequences and self.num_prefill_tokens < max_prefill_tokens

    def uncached_tokens(self, request: GroupRequest) -> int:
        """Return how many tokens of the prompt the engine would have to compute."""
        tokens = len(request.state.request.prompt_token_ids)
        if request.keys is None:
            return tokens
        return max(1, tokens - self.prefixes.match(request.keys.keys) * self.engine.info.block_size)

    def cost(self, request: GroupRequest) -> int:
        """Return the work in front of the request and its own, in prompt tokens."""
        cost = UNCACHED_COST * self.uncached_tokens(request) + self.num_prefill_tokens
        cost += SEQUENCE_COST * self.num_sequences
        if request.lora is not None and request.lora.name not in self.adapters:
            cost += ADAPTER_COST
        return cost


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

    def __call__(self, request: GroupRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        best = min(engines, key=lambda engine: engine.cost(request))
        others = [engine for engine in engines if engine is not best]
        if not others or request.keys is None:
            return best
        other = min(others, key=lambda engine: engine.num_sequences)
        keys = request.keys.keys
        held, held_by_other = best.prefixes.match(keys), other.prefixes.match(keys)
        if held <= held_by_other:
            return best
        key = keys[held_by_other]
        extra = self._extra_work.pop(key, 0) + SEQUENCE_COST * (best.num_sequences - other.num_sequences)
        if extra > UNCACHED_COST * (held - held_by_other) * best.engine.info.block_size:
            return other
        if extra > 0:
            self._extra_work[key] = extra
            if len(self._extra_work) > _MAX_PREFIXES:
                self._extra_work.popitem(last=False)
        return best
