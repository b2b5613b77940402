"""Size of the KV cache, from the options that limit it."""

from __future__ import annotations

import pytest

from neso.engine.config import EngineConfig
from neso.engine.core.scheduler_config import CPU_LIMITS
from neso.engine.errors import EngineError
from neso.engine.load.cache_size import memory_report, num_cache_blocks, step_memory, step_size
from neso.engine.runners.step_memory import StepMemory, StepSize, StepTooLarge

NOTHING = StepMemory(0)


class Machine:
    """A machine whose free memory holds 100 blocks of 16 tokens. `step` is what `step_memory` returns or raises."""

    share_of_free_memory = 0.25

    def __init__(self, step: StepMemory | Exception = NOTHING) -> None:
        self.step = step

    def free_memory(self) -> int:
        return 100 * 1600

    def cache_bytes_per_block(self, block_size: int) -> int:
        return 100 * block_size

    def step_memory(self, size, encode_image=None) -> StepMemory:
        if isinstance(self.step, Exception):
            raise self.step
        return self.step


def size_of(config: EngineConfig, max_model_len: int = 100) -> StepSize:
    return step_size(config.scheduler.resolve(CPU_LIMITS), config.speculation.max_draft_tokens, max_model_len)


def blocks(max_model_len: int = 10_000, *, needed: StepMemory = NOTHING, **options) -> int:
    config = EngineConfig.from_options("model", options)
    return num_cache_blocks(config, Machine(), size_of(config, max_model_len), needed)  # type: ignore[arg-type]


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


def test_the_fraction_is_of_the_memory_that_steps_and_graphs_leave():
    needed = StepMemory(step=30 * 1600, graphs=20 * 1600, measured=True)
    assert blocks(needed=needed) == 12
    assert blocks(needed=needed, kv_cache_free_gpu_mem_fraction=1.0) == 50
    # Engines of one device divide its memory; each has its own steps.
    assert (
        blocks(needed=StepMemory(30 * 1600), kv_cache_free_gpu_mem_fraction=1.0, data_parallel_size=2) == 20
    )


@pytest.mark.parametrize("step", [99 * 1600, 200 * 1600])
def test_a_step_that_leaves_no_room_for_the_cache_names_the_options_to_lower(step):
    message = (
        r"at least 2 blocks: 156.2 KiB are free.*lower max_num_batched_tokens \(77\) or max_num_seqs \(5\)"
    )
    with pytest.raises(EngineError, match=message):
        blocks(needed=StepMemory(step), max_num_batched_tokens=77, max_num_seqs=5)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"num_blocks": 71}, "num_blocks"), ({"kv_cache_memory": 71 * 1600}, "kv_cache_memory")],
)
def test_a_given_cache_must_leave_room_for_a_measured_step(options, name):
    measured = StepMemory(step=20 * 1600, graphs=10 * 1600, measured=True)
    with pytest.raises(
        EngineError, match=f"110.9 KiB and the largest step, 46.9 KiB.*lower {name}, or lower max_num"
    ):
        blocks(needed=measured, **options)
    assert blocks(needed=StepMemory(30 * 1600), **options) == 71, "an estimate rejects nothing"


def test_the_models_of_speculative_decoding_take_turns():
    size = size_of(EngineConfig.from_options("model", {}))
    target, draft = StepMemory(100, graphs=7, measured=True), StepMemory(300, graphs=5, measured=True)
    assert step_memory(size, Machine(target), Machine(draft)) == StepMemory(300, graphs=12, measured=True)  # type: ignore[arg-type]


def test_a_step_that_runs_out_of_memory_names_the_options_to_lower():
    size = size_of(EngineConfig.from_options("model", {"max_num_seqs": 3}))
    failing = Machine(StepTooLarge("CUDA out of memory. Tried to allocate 2.00 GiB"))
    with pytest.raises(
        EngineError, match=r"largest step does not fit.*max_num_seqs \(3\): CUDA out of memory"
    ):
        step_memory(size, failing)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("speculation", "rows"),
    [
        ({}, 4),
        ({"speculative": "ngram", "num_speculative_tokens": 3}, 16),
        ({"speculative": "medusa", "medusa_choices": [[0], [0, 0], [1], [1, 0], [1, 1]]}, 24),
        ({"speculative": "ngram", "num_speculative_tokens": 40}, 100),
    ],
)
def test_every_draft_token_has_a_row_of_logits(speculation, rows):
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 100, **speculation}
    assert size_of(EngineConfig.from_options("model", options)).num_rows == rows


def test_the_report_names_what_takes_memory():
    size = size_of(EngineConfig.from_options("model", {}))
    needed = StepMemory(step=3 << 29, graphs=300 << 20, measured=True)
    assert memory_report(size, needed, weights=15 << 30, cache=50 << 30, free=58 << 30) == (
        "memory: weights 15.0 GiB, largest step 1.5 GiB (measured: max_num_batched_tokens 1024, max_num_seqs 64), "
        "CUDA graphs 300.0 MiB, KV cache 50.0 GiB, unused 6.2 GiB"
    )
    estimated = memory_report(size, StepMemory(5 << 20), weights=0, cache=1 << 30, free=2 << 30)
    assert estimated.startswith("memory: largest step 5.0 MiB (estimated:") and "graphs" not in estimated


def test_tensorrt_llm_alias_of_prefix_caching():
    assert not EngineConfig.from_options(
        "model", {"enable_kv_cache_reuse": "false"}
    ).scheduler.enable_prefix_caching
