"""Vocabulary masks: numpy, C++ and torch exclude the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_draws import random_draws

from neso.engine.runners.native.runner import NativeRunner
from neso.engine.runners.torch import sampling as torch_sampling
from neso.engine.sampling.token_sampling import INVALID_TOKEN, RowMasks, SamplingBatch, choose
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint

Choose = Callable[[np.ndarray, SamplingBatch], np.ndarray]


@pytest.fixture(scope="module")
def native(checkpoint_factory: Callable[..., Path]) -> NativeRunner:
    # Not a multiple of 32: the last word of a mask is partially used.
    with Checkpoint(checkpoint_factory("llama", vocab_size=391)) as source:
        return NativeRunner.load(decoder_spec(source.config), source)


@pytest.fixture(params=["numpy", "native", "torch"])
def chooser(request: pytest.FixtureRequest, native: NativeRunner, monkeypatch: pytest.MonkeyPatch) -> Choose:
    monkeypatch.setattr(torch_sampling, "_MASKED_AT_ONCE", 3)

    def by_torch(logits: np.ndarray, draws: SamplingBatch) -> np.ndarray:
        return torch_sampling.choose(torch.from_numpy(logits), draws).numpy()

    return {"numpy": choose, "native": native.choose, "torch": by_torch}[request.param]


def random_masks(
    rng: np.random.Generator, rows: int, vocab: int, share: float
) -> tuple[RowMasks, np.ndarray]:
    """Return masks for some of the rows, with one extra word, and the allowed tokens as bool[rows, vocab]."""
    masked = np.flatnonzero(rng.random(rows) < 0.7).astype(np.int32)
    allowed = rng.random((rows, vocab)) < share
    allowed[:, 64:160] = rng.random((rows, 1)) < 0.5  # words of one kind
    allowed[np.arange(rows), rng.integers(0, vocab, rows)] = True
    padded = np.zeros((len(masked), (vocab // 32 + 2) * 32), np.uint8)
    padded[:, :vocab] = allowed[masked]
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    free = np.setdiff1d(np.arange(rows), masked)
    allowed[free] = True
    return RowMasks(masked, bits), allowed


@pytest.mark.parametrize("seed", range(12))
def test_masks_equal_minus_infinity(native: NativeRunner, chooser: Choose, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, vocab = int(rng.integers(1, 20)), native.spec.vocab_size
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    masks, allowed = random_masks(rng, rows, vocab, rng.choice([0.01, 0.3, 0.99]))
    draws = random_draws(rng, rows)
    by_hand = np.where(allowed, logits, np.float32(-np.inf))
    expected = chooser(by_hand, draws)
    found = chooser(logits.copy(), dataclasses.replace(draws, masks=masks))
    np.testing.assert_array_equal(found, expected)
    assert allowed[np.arange(rows), found].all()


def test_excluded_tokens_may_have_nan_logits(native: NativeRunner, chooser: Choose) -> None:
    vocab = native.spec.vocab_size
    logits = np.zeros((2, vocab), np.float32)
    logits[:, 5] = np.nan
    bits = np.zeros((1, vocab // 32 + 1), np.int32)
    bits[0, 1] = 1 << 3
    draws = random_draws(np.random.default_rng(1), 2, temperature=0.0)
    masked = dataclasses.replace(draws, masks=RowMasks(np.array([1], np.int32), bits))
    assert chooser(logits, masked).tolist() == [INVALID_TOKEN, 35]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_allowed_tokens_is_invalid(chooser: Choose, temperature: float) -> None:
    logits = np.zeros((3, 391), np.float32)
    logits[0, 32:64] = logits[2] = -np.inf
    bits = np.zeros((1, 391 // 32 + 1), np.int32)
    bits[0, 1] = -1
    draws = random_draws(np.random.default_rng(1), 3, temperature=temperature)
    masked = dataclasses.replace(draws, masks=RowMasks(np.array([0], np.int32), bits))
    tokens = chooser(logits, masked)
    assert tokens[0] == tokens[2] == INVALID_TOKEN != tokens[1]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_allowed_reads_the_bits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(1, 200))
    masks, allowed = random_masks(rng, 4, max(vocab, 161), 0.4)
    for index, row in enumerate(masks.rows):
        np.testing.assert_array_equal(masks.allowed(index, max(vocab, 161)), allowed[row])


def test_mismatched_masks_are_rejected(native: NativeRunner) -> None:
    logits = np.zeros((2, native.spec.vocab_size), np.float32)
    draws = random_draws(np.random.default_rng(3), 2)
    short = RowMasks(np.array([0], np.int32), np.zeros((1, 3), np.int32))
    outside = RowMasks(np.array([2], np.int32), np.zeros((1, native.spec.vocab_size // 32 + 1), np.int32))
    for masks in (short, outside):
        with pytest.raises(ValueError, match="mask"):
            native.choose(logits, dataclasses.replace(draws, masks=masks))
