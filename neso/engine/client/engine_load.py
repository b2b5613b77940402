"""The requests in flight of each engine of a group, and the cost of sending another one to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.engine_client import Deliver
from neso.engine.client.output_processor import PooledState, RequestState
from neso.engine.client.prefix_estimate import PrefixEstimate, PrefixKeys
from neso.engine.core.sequence import Sequence as QueuedSequence
from neso.generation import LoraRequest

SEQUENCE_COST = 32
"""A sequence in flight counts as this many prompt tokens in the comparison of engines."""
ADAPTER_COST = 64
"""An adapter that an engine does not run at present counts as this many prompt tokens."""


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
        cost = self.uncached_tokens(request) + self.num_prefill_tokens + SEQUENCE_COST * self.num_sequences
        if request.lora is not None and request.lora.name not in self.adapters:
            cost += ADAPTER_COST
        return cost


def cheapest(request: GroupRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
    """Choose the engine with the least work: cached prefixes of the prompt reduce it, other requests add to it."""
    return min(engines, key=lambda engine: engine.cost(request))
