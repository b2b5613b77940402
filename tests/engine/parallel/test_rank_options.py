"""Options of an engine on two ranks of the torch and native runners: recordings, and a KV cache in host memory."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from oracle import greedy
from require_mpi import requires_mpi

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.config import EngineConfig
from neso.engine.core.stats import EngineStats
from neso.engine.diagnostics.replay import main, read_engine, read_steps
from neso.engine.errors import EngineError
from neso.generation import GenerationRequest, SamplingParams

pytestmark = [requires_mpi, pytest.mark.slow]

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(6, 300) for _ in range(30 + 3 * i)] for i in range(5)]


async def generate(directory: Path, rounds: int, **options: Any) -> tuple[list[list[list[int]]], EngineStats]:
    """Return the tokens of the prompts in each round, and the last statistics."""
    common = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": 4, "num_threads": 1}
    engine = await AsyncEngine.start(EngineConfig.from_options(str(directory), {**common, **options}))

    async def one(prompt: list[int]) -> list[int]:
        outputs = [output async for output in engine.generate(GenerationRequest(prompt, GREEDY))]
        return [token for output in outputs for delta in output.deltas for token in delta.token_ids]

    try:
        found = [await asyncio.gather(*map(one, prompts())) for _ in range(rounds)]
        return found, await engine.check_integrity()
    finally:
        await engine.stop()


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
async def test_blocks_in_host_memory(checkpoint_factory, size: str) -> None:
    directory = checkpoint_factory("llama")
    found, stats = await generate(
        directory, 3, **{size: 2}, runner="torch", num_blocks=16, kv_cache_host_memory_bytes=1 << 22
    )
    assert found == [greedy(directory, prompts(), 10)] * 3
    assert stats.host_loaded_blocks > 0


async def test_runner_without_host_cache_is_named(checkpoint_factory) -> None:
    with pytest.raises(EngineError, match="NativeRunner already keeps its KV cache in host memory"):
        await generate(
            checkpoint_factory("llama"), 1, tensor_parallel_size=2, kv_cache_host_memory_bytes=1 << 20
        )


async def test_recording_of_ranks_is_replayed_on_one(checkpoint_factory, tmp_path: Path) -> None:
    directory, folder = checkpoint_factory("llama"), tmp_path / "steps"
    found, _ = await generate(
        directory, 1, pipeline_parallel_size=2, runner="native", num_blocks=64, record_steps=str(folder)
    )
    assert found == [greedy(directory, prompts(), 10)]
    assert read_engine(folder).config.num_ranks == 2
    tokens = {token for plan in read_steps(folder) for token in plan.token_ids.tolist()}
    assert tokens >= {token for prompt in prompts() for token in prompt}
    assert main([str(folder), "--against", "reference"]) == 0
