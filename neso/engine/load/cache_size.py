"""Computes the size of the KV cache from the options that limit it."""

from __future__ import annotations

from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.runners.base import Runner

MIN_BLOCKS = 2


def num_cache_blocks(
    config: EngineConfig, runner: Runner, max_model_len: int, draft_runner: Runner | None = None
) -> int:
    """Return the number of cache blocks; a draft model has the same number.

    It is `num_blocks`, or the minimum of

    - `kv_cache_memory`, or the fraction `kv_cache_free_gpu_mem_fraction` of the available memory (by default the
      runner's `share_of_free_memory`), divided by the number of engines that share it,
    - `max_tokens_in_paged_kv_cache`,
    - the blocks required by `max_num_seqs` sequences of full length.

    Raises `EngineError` if the number is less than two.
    """
    if config.num_blocks is not None:
        return _check_minimum(config.num_blocks, f"num_blocks is {config.num_blocks}")
    block_size = config.scheduler.block_size
    useful = config.scheduler.max_num_seqs * -(-max_model_len // block_size)
    if config.max_tokens_in_paged_kv_cache is not None:
        tokens = config.max_tokens_in_paged_kv_cache
        useful = min(
            useful, _check_minimum(tokens // block_size, f"max_tokens_in_paged_kv_cache is {tokens}")
        )
    memory = _cache_memory(config, runner)
    per_block = bytes_per_block(block_size, runner, draft_runner)
    source = "available memory" if config.kv_cache_memory is None else "kv_cache_memory"
    return min(
        _check_minimum(memory // per_block, f"{source} is {memory} bytes, a block takes {per_block}"), useful
    )


def bytes_per_block(block_size: int, *runners: Runner | None) -> int:
    """Return the size in bytes of one block in the caches of all runners."""
    return sum(runner.cache_bytes_per_block(block_size) for runner in runners if runner is not None)


def num_host_blocks(config: EngineConfig, runner: Runner) -> int:
    """Return the number of blocks in host memory.

    Raises `EngineError` if the runner or the options do not support it.
    """
    memory = config.kv_cache_host_memory_bytes
    if not memory:
        return 0
    if "host_cache" not in runner.capabilities:
        raise EngineError(
            f"kv_cache_host_memory_bytes: {runner.name} already keeps its KV cache in host memory"
        )
    if not config.scheduler.enable_prefix_caching:
        raise EngineError("kv_cache_host_memory_bytes needs enable_prefix_caching: it keeps cached prefixes")
    return _check_minimum(
        memory // runner.cache_bytes_per_block(config.scheduler.block_size),
        f"kv_cache_host_memory_bytes is {memory}",
    )


def _cache_memory(config: EngineConfig, runner: Runner) -> int:
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    share = config.kv_cache_free_gpu_mem_fraction
    if share is None:
        share = runner.share_of_free_memory
    elif not 0 < share <= 1:
        raise EngineError(f"kv_cache_free_gpu_mem_fraction must be above 0 and at most 1, got {share}")
    if config.device_ids is None and config.data_parallel_size is not None:
        share /= config.data_parallel_size  # the engines of the model share the memory
    return int(runner.free_memory() * share)


def _check_minimum(num_blocks: int, reason: str) -> int:
    if num_blocks < MIN_BLOCKS:
        raise EngineError(f"the KV cache needs at least {MIN_BLOCKS} blocks: {reason}")
    return num_blocks
