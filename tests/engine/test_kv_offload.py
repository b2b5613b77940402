"""KV-cache blocks offloaded to host memory: tokens do not depend on which blocks were moved."""

from __future__ import annotations

import random

import pytest
from oracle import greedy

from neso.engine.client.llm import LLM
from neso.engine.errors import EngineError
from neso.engine.runners.torch import kv_cache
from neso.generation import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(6, 300) for _ in range(30 + 3 * i)] for i in range(5)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("host_blocks", [20, 1000])
def test_tokens_do_not_change(checkpoint_factory, monkeypatch, overlap, host_blocks):
    """With torch on a CPU, "device" and "host" are both host memory; the copy code is that of a GPU."""
    monkeypatch.setattr(kv_cache, "_PINNED_BYTES", 20_000)  # eight blocks
    directory = checkpoint_factory("llama")
    expected = greedy(directory, prompts(), 10)
    llm = LLM(directory, runner="torch", num_blocks=16, block_size=4, enable_overlap=overlap, dtype="float32",
              kv_cache_host_memory_bytes=host_blocks * 3 * 2 * 2 * 12 * 4 * 4)  # fmt: skip
    host = llm.core.scheduler.kv.prefix_cache.host
    assert host.num_blocks == host_blocks
    for _ in range(3):
        results = llm.generate(prompts(), GREEDY, progress=False)
        assert [result.outputs[0].token_ids for result in results] == expected
        llm.core.check_integrity()
    # With cyclic access, a cache that cannot hold all blocks evicts each one before its reuse.
    assert host.stats.loaded_blocks > 0 if host_blocks == 1000 else host.stats.evicted_blocks > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runner": "native"}, "NativeRunner already keeps its KV cache in host memory"),
        ({"runner": "torch", "enable_prefix_caching": False}, "needs enable_prefix_caching"),
    ],
)
def test_unsupported_configurations_are_rejected(checkpoint_factory, options, message):
    with pytest.raises(EngineError, match=message):
        LLM(checkpoint_factory("llama"), kv_cache_host_memory_bytes=1 << 20, **options)
