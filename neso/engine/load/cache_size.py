"""How large the key-value cache is: the options that limit it, in one place."""

from __future__ import annotations

from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.runners.base import Runner

LEAST_BLOCKS = 2


def num_cache_blocks(
    config: EngineConfig, runner: Runner, max_model_len: int, draft_runner: Runner | None = None
) -> int:
    """Blocks of the cache; a draft model has as many. Raises `EngineError` when the limits leave less than two.

    `num_blocks` says it; else it is the least of

    - what `kv_cache_memory` holds, or that share of the free memory that `kv_cache_free_gpu_mem_fraction` names
      (the runner's own share if neither is given),
    - `max_tokens_in_paged_kv_cache`,
    - what `max_num_seqs` sequences of full length need.
    """
    if config.num_blocks is not None:
        return _enough(config.num_blocks, f"num_blocks is {config.num_blocks}")
    block_size = config.scheduler.block_size
    useful = config.scheduler.max_num_seqs * -(-max_model_len // block_size)
    if config.max_tokens_in_paged_kv_cache is not None:
        tokens = config.max_tokens_in_paged_kv_cache
        useful = min(useful, _enough(tokens // block_size, f"max_tokens_in_paged_kv_cache is {tokens}"))
    memory = _memory(config, runner)
    per_block = bytes_per_block(block_size, runner, draft_runner)
    given = "free memory" if config.kv_cache_memory is None else "kv_cache_memory"
    return min(_enough(memory // per_block, f"{given} is {memory} bytes, a block takes {per_block}"), useful)


def bytes_per_block(block_size: int, *runners: Runner | None) -> int:
    """Memory of a block in the caches of all runners."""
    return sum(runner.cache_bytes_per_block(block_size) for runner in runners if runner is not None)


def num_host_blocks(config: EngineConfig, runner: Runner) -> int:
    """Blocks of the cache's second tier. Raises `EngineError` if the runner or the options have no use for one."""
    memory = config.kv_cache_host_memory_bytes
    if not memory:
        return 0
    if "host_cache" not in runner.capabilities:
        raise EngineError(
            f"kv_cache_host_memory_bytes: {type(runner).__name__} keeps its cache on the host already"
        )
    if not config.scheduler.enable_prefix_caching:
        raise EngineError("kv_cache_host_memory_bytes needs enable_prefix_caching: it keeps cached prefixes")
    return _enough(
        memory // runner.cache_bytes_per_block(config.scheduler.block_size),
        f"kv_cache_host_memory_bytes is {memory}",
    )


def _memory(config: EngineConfig, runner: Runner) -> int:
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    share = config.kv_cache_free_gpu_mem_fraction
    if share is None:
        share = runner.share_of_free_memory
    elif not 0 < share <= 1:
        raise EngineError(f"kv_cache_free_gpu_mem_fraction must be above 0 and at most 1, got {share}")
    return int(runner.free_memory() * share)


def _enough(num_blocks: int, why: str) -> int:
    if num_blocks < LEAST_BLOCKS:
        raise EngineError(f"the KV cache needs at least {LEAST_BLOCKS} blocks: {why}")
    return num_blocks
