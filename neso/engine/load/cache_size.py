"""Computes the size of the KV cache from the options that limit it."""

from __future__ import annotations

from collections.abc import Callable

from neso.engine.config import EngineConfig
from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.errors import EngineError
from neso.engine.runners.base import Runner
from neso.engine.runners.step_memory import StepMemory, StepSize, StepTooLarge

MIN_BLOCKS = 2


def step_size(scheduler: SchedulerConfig, max_draft_tokens: int, max_model_len: int) -> StepSize:
    """Return the size of the largest step that the scheduler makes."""
    rows = scheduler.max_num_seqs * (1 + max_draft_tokens)
    return StepSize(
        num_tokens=scheduler.max_num_batched_tokens,
        num_sequences=scheduler.max_num_seqs,
        num_rows=min(rows, scheduler.max_num_batched_tokens),
        chunk=scheduler.max_prefill_chunk,
        max_model_len=max_model_len,
        block_size=scheduler.block_size,
    )


def step_memory(
    size: StepSize,
    runner: Runner,
    draft_runner: Runner | None = None,
    encode_image: Callable[[], object] | None = None,
) -> StepMemory:
    """Return the memory that steps need besides weights and KV cache, see `Runner.step_memory`.

    Raises `EngineError` if the largest step cannot run.
    """
    try:
        needed = runner.step_memory(size, encode_image)
        return needed if draft_runner is None else needed.beside(draft_runner.step_memory(size))
    except StepTooLarge as error:
        raise EngineError(f"the largest step does not fit into the memory: {_lower(size)}: {error}") from None


def num_cache_blocks(
    config: EngineConfig,
    runner: Runner,
    size: StepSize,
    needed: StepMemory,
    draft_runner: Runner | None = None,
) -> int:
    """Return the number of cache blocks; a draft model has the same number. `needed`: by the largest step, of `size`.

    It is `num_blocks`, or the minimum of

    - `kv_cache_memory`, or the fraction `kv_cache_free_gpu_mem_fraction` (by default the runner's
      `share_of_free_memory`) of the free memory without `needed`; several engines on one device share the free memory,
    - `max_tokens_in_paged_kv_cache`,
    - the blocks required by `max_num_seqs` sequences of full length.

    Raises `EngineError` if the number is less than two, or if a measured step does not fit beside the cache.
    """
    num_blocks = _num_cache_blocks(config, runner, size, needed, draft_runner)
    cache = num_blocks * bytes_per_block(size.block_size, runner, draft_runner)
    free = _free_memory(config, runner)
    if needed.measured and cache + needed.total > free:
        option = "num_blocks" if config.num_blocks is not None else "kv_cache_memory"
        raise EngineError(
            f"a KV cache of {format_size(cache)} and the largest step, {format_size(needed.total)}, do not fit into "
            f"{format_size(free)} of free memory: lower {option}, or {_lower(size)}"
        )
    return num_blocks


def _num_cache_blocks(
    config: EngineConfig, runner: Runner, size: StepSize, needed: StepMemory, draft_runner: Runner | None
) -> int:
    if config.num_blocks is not None:
        return _check_minimum(config.num_blocks, f"num_blocks is {config.num_blocks}")
    block_size, max_model_len = size.block_size, size.max_model_len
    useful = size.num_sequences * -(-max_model_len // block_size)
    if config.max_tokens_in_paged_kv_cache is not None:
        tokens = config.max_tokens_in_paged_kv_cache
        useful = min(
            useful, _check_minimum(tokens // block_size, f"max_tokens_in_paged_kv_cache is {tokens}")
        )
    per_block = bytes_per_block(block_size, runner, draft_runner)
    if config.kv_cache_memory is not None:
        memory = config.kv_cache_memory
        reason = f"kv_cache_memory is {memory} bytes, a block takes {per_block}"
    else:
        free = _free_memory(config, runner)
        memory = int(max(0, free - needed.total) * _share(config, runner))
        reason = (
            f"{format_size(free)} are free, the largest step needs {format_size(needed.total)}, and a block takes "
            f"{format_size(per_block)}; {_lower(size)}"
        )
    return min(_check_minimum(memory // per_block, reason), useful)


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


def memory_report(size: StepSize, needed: StepMemory, weights: int, cache: int, free: int) -> str:
    """Return a line of the log. All numbers are bytes; `weights` is 0 if unknown, `free` was free before the cache."""
    parts = [f"weights {format_size(weights)}"] if weights else []
    kind = "measured" if needed.measured else "estimated"
    parts.append(
        f"largest step {format_size(needed.step)} ({kind}: max_num_batched_tokens {size.num_tokens}, "
        f"max_num_seqs {size.num_sequences})"
    )
    if needed.graphs:
        parts.append(f"CUDA graphs {format_size(needed.graphs)}")
    parts += [
        f"KV cache {format_size(cache)}",
        f"unused {format_size(max(0, free - needed.total - cache))}",
    ]
    return "memory: " + ", ".join(parts)


def format_size(num_bytes: int) -> str:
    """Return a size in the unit GiB, MiB or KiB that makes it at least 1, or in bytes."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def _lower(size: StepSize) -> str:
    return f"lower max_num_batched_tokens ({size.num_tokens}) or max_num_seqs ({size.num_sequences})"


def _share(config: EngineConfig, runner: Runner) -> float:
    share = config.kv_cache_free_gpu_mem_fraction
    if share is None:
        return runner.share_of_free_memory
    if not 0 < share <= 1:
        raise EngineError(f"kv_cache_free_gpu_mem_fraction must be above 0 and at most 1, got {share}")
    return share


def _free_memory(config: EngineConfig, runner: Runner) -> int:
    """Return the free memory for this engine's cache and steps."""
    free = runner.free_memory()
    if config.device_ids is None and config.data_parallel_size is not None:
        free //= config.data_parallel_size  # the engines of the model share the memory
    return free


def _check_minimum(num_blocks: int, reason: str) -> int:
    if num_blocks < MIN_BLOCKS:
        raise EngineError(f"the KV cache needs at least {MIN_BLOCKS} blocks: {reason}")
    return num_blocks
