"""The reference runner: padding, cache size, block copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from plan_builder import PlanBuilder, random_tokens

from neso.engine.runners.base import CacheLayout
from neso.engine.runners.reference.runner import ReferenceRunner
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint


def load(directory: Path) -> ReferenceRunner:
    with Checkpoint(directory) as checkpoint:
        return ReferenceRunner.load(decoder_spec(checkpoint.config), checkpoint)


def test_nan_in_one_sequence_does_not_affect_others(llama_checkpoint: Path) -> None:
    """Padding does not read blocks of other sequences, so NaN in one sequence's cache does not spread."""
    runner = load(llama_checkpoint)
    builder = PlanBuilder()
    runner.allocate_cache(builder.layout)
    spoilt, short, long = (builder.sequence(random_tokens(length, seed=length)) for length in (9, 6, 14))
    for sequence in (spoilt, short, long):
        runner.step(builder.plan([(sequence, len(sequence.tokens) - 1)]))
    assert runner._cache is not None
    runner._cache._layers[1][:, spoilt.blocks[0]] = np.nan
    logits = runner.step(builder.plan([(spoilt, 1), (short, 1), (long, 1)]))
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1:]).all()


def test_cache_size(llama_checkpoint: Path) -> None:
    runner = load(llama_checkpoint)
    # layers x (keys, values) x heads x tokens x width x float32
    assert runner.cache_bytes_per_block(16) == 3 * 2 * 2 * 16 * 12 * 4


def test_blocks_can_be_swapped_in_one_step(llama_checkpoint: Path) -> None:
    """All sources of block copies are read before any target is written."""
    runner = load(llama_checkpoint)
    runner.allocate_cache(CacheLayout(4, 2))
    cache = runner._cache
    assert cache is not None
    cache._layers[0][:] = np.arange(4)[None, :, None, None]
    cache.copy_blocks(np.array([[0, 1], [1, 0], [2, 3]], np.int32))
    assert cache._layers[0][0, :, 0, 0].tolist() == [1, 0, 2, 2]
