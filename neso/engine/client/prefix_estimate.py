"""Estimate of the prompt prefixes in the prefix cache of an engine, made from the requests that were sent to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from neso.engine.core.prefix_keys import AdapterVersion, next_key, root_key
from neso.engine.core.request import EngineRequest


class PrefixKeys:
    """Keys of the full blocks of a sequence; each covers all tokens up to the end of its block.

    Sequences with equal keys have equal tokens, adapters, salts and images, except for collisions of 64-bit hashes.

    known_to_engines: engines report these keys for the blocks of the request. They replace images and embeddings by
    digests that only they know.
    """

    def __init__(self, request: EngineRequest, block_size: int) -> None:
        self._block_size = block_size
        content = [part for image in request.images for part in (image.positions, image.pixels)]
        if request.input_embeddings is not None:
            content += [request.input_embeddings.positions, request.input_embeddings.rows]
        self.known_to_engines = not content
        adapter = () if request.lora is None else (AdapterVersion(request.lora.name, 0),)
        others = tuple(blake2b(part, digest_size=16).hexdigest() for part in content)
        self._last = root_key((*request.cache_identity, *adapter, *others))
        self._rest: list[int] = []
        self.keys: list[int] = []
        self.extend(request.prompt_token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        size, tokens = self._block_size, [*self._rest, *token_ids]
        full = len(tokens) // size * size
        for start in range(0, full, size):
            self._last = next_key(self._last, tokens[start : start + size])
            self.keys.append(self._last)
        self._rest = tokens[full:]


class PrefixEstimate:
    """Keys of the blocks that an engine has computed last, at most as many as its cache has blocks.

    It can be wrong in both directions: the engine also evicts by the priorities of requests, and running sequences
    take blocks from the cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, keys: Sequence[int]) -> int:
        """Return how many of the first blocks the engine holds."""
        for number, key in enumerate(keys):
            if key not in self._keys:
                return number
        return len(keys)

    def add(self, keys: Sequence[int]) -> None:
        """Record blocks that the engine computes or uses."""
        for key in reversed(keys):  # the end of a prefix is evicted before its beginning
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.num_blocks:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """Forget all blocks, because the engine has ended."""
        self._keys.clear()
