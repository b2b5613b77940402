"""Fake model whose logits depend on the whole text, so that beams cross, and a reference beam search."""

from __future__ import annotations

import zlib

import numpy as np
from fake_engine import FakeRunner

from neso.engine.addons.registry import standard_addons
from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.loop.engine_core import EngineCore

VOCAB = 23


def logits_after(tokens: list[int]) -> np.ndarray:
    """Return logits that depend on all tokens and their order."""
    return np.random.default_rng(zlib.crc32(str(tokens).encode())).normal(size=VOCAB).astype(np.float32)


class CrossingRunner(FakeRunner):
    """Reads the tokens from the paged cache as attention would."""

    vocab = VOCAB

    def logits_of(self, tokens: list[int]) -> np.ndarray:
        return logits_after(tokens)


def make_beam_core(num_blocks: int = 64, **options) -> EngineCore:
    defaults = {"max_num_seqs": 12, "max_num_batched_tokens": 32, "max_prefill_chunk": 32, "block_size": 4}
    runner = CrossingRunner()
    config = SchedulerConfig(**{**defaults, **options})
    return EngineCore(runner, config, num_blocks, standard_addons(runner))


def best_sequences(prompt: list[int], width: int, max_tokens: int, ends: tuple[int, ...], early: bool):
    """Return outputs and log-probability sums of a textbook beam search (length penalty 1, float64), best first."""
    live, finished = [(0.0, [])], []
    for length in range(1, max_tokens + 1):
        candidates = []
        for total, tokens in live:
            row = logits_after(prompt + tokens).astype(np.float64)
            row -= np.log(np.exp(row).sum())
            candidates += [(total + row[i], [*tokens, i]) for i in range(VOCAB)]
        candidates.sort(key=lambda c: -c[0])
        candidates = candidates[: width * max(2, 1 + len(ends))]
        live = []
        for rank, (total, tokens) in enumerate(candidates):
            if tokens[-1] not in ends and length < max_tokens:
                live.append((total, tokens))
            elif rank < width:
                finished.append((total / length, total, tokens))
        live = live[:width]
        finished = sorted(finished, key=lambda f: -f[0])[:width]
        if len(finished) == width and (early or (live and live[0][0] / length <= finished[-1][0])):
            break
    return [(tokens, total) for _, total, tokens in finished]
