"""Size of the KV cache, from the options that limit it."""

from __future__ import annotations

import pytest

from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.load.cache_size import num_cache_blocks


class Machine:
    """A machine whose free memory holds 100 blocks of 16 tokens."""

    share_of_free_memory = 0.25

    def free_memory(self) -> int:
        return 100 * 1600

    def cache_bytes_per_block(self, block_size: int) -> int:
        return 100 * block_size


def blocks(max_model_len: int = 10_000, **options) -> int:
    return num_cache_blocks(EngineConfig.from_options("model", options), Machine(), max_model_len)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 25),
        ({"kv_cache_free_gpu_mem_fraction": "0.9"}, 90),
        ({"kv_cache_free_gpu_mem_fraction": 0.9, "max_tokens_in_paged_kv_cache": 333}, 20),
        ({"kv_cache_free_gpu_mem_fraction": 0.1, "max_tokens_in_paged_kv_cache": 333}, 10),
        ({"kv_cache_memory": 16 * 1600, "kv_cache_free_gpu_mem_fraction": 0.9}, 16),
        ({"num_blocks": 7, "kv_cache_memory": 16 * 1600}, 7),
        ({"kv_cache_free_gpu_mem_fraction": 1.0, "max_num_seqs": 2, "block_size": 4}, 400),
    ],
)
def test_the_lowest_limit_applies(options, expected):
    assert blocks(**options) == expected


def test_size_is_limited_to_the_need_of_all_sequences():
    assert blocks(max_model_len=20, kv_cache_free_gpu_mem_fraction=1.0, max_num_seqs=3) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 1}, "num_blocks is 1"),
        ({"max_tokens_in_paged_kv_cache": 31}, "max_tokens_in_paged_kv_cache is 31"),
        ({"kv_cache_memory": 1700}, "kv_cache_memory.*1700.*1600"),
        ({"kv_cache_free_gpu_mem_fraction": 0}, "kv_cache_free_gpu_mem_fraction must be"),
        ({"kv_cache_free_gpu_mem_fraction": 1.5}, "kv_cache_free_gpu_mem_fraction must be"),
    ],
)
def test_too_few_blocks_are_rejected(options, message):
    with pytest.raises(EngineError, match=message):
        blocks(**options)


def test_tensorrt_llm_alias_of_prefix_caching():
    assert not EngineConfig.from_options(
        "model", {"enable_kv_cache_reuse": "false"}
    ).scheduler.enable_prefix_caching
