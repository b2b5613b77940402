"""Sampling in torch without sorting the vocabulary, against sorting every row.

Runs on the CPU, where the runner uses plain torch; a GPU runs a Triton kernel, which
bench/gpu_features.py measures.

usage: python bench/device_sampling.py [--rows 32] [--vocab 128256] [--repeats 5] [--smoke]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from smoke import parse_arguments
from torch import Tensor

from neso.engine.runners.torch import sampling
from neso.engine.sampling.token_sampling import SamplingBatch

FILTERS = {"top_k 50": (50, 1.0, 0.0), "top_p 0.9": (0, 0.9, 0.0), "top_k 20, top_p 0.95": (20, 0.95, 0.0)}


def kept_by_sorting(weights: Tensor, draws: SamplingBatch) -> Tensor:
    """Set the weights excluded by the filters to 0, with a stable sort of every row."""
    vocab = weights.shape[1]
    top_k = torch.from_numpy(np.where(draws.top_k > 0, draws.top_k, vocab))[:, None]
    top_p = torch.from_numpy(draws.top_p).double()[:, None]
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    in_top_k = torch.arange(vocab) < top_k
    mass = ordered.masked_fill(~in_top_k, 0).cumsum(dim=1, dtype=torch.float64)
    in_top_p = (mass - ordered < top_p * mass[:, -1:]) | (top_p >= 1)
    keep = in_top_k & in_top_p & (ordered >= torch.from_numpy(draws.min_p)[:, None] * ordered[:, :1])
    keep[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, order, ordered.masked_fill(~keep, 0))


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parse_arguments(parser, rows=4, vocab=2000, repeats=1)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    logits = torch.from_numpy((rng.standard_normal((arguments.rows, arguments.vocab)) * 3).astype(np.float32))
    without_sorting = sampling._kept
    print(f"torch on the CPU, one thread, {arguments.rows} rows of {arguments.vocab} logits, temperature 0.7")
    for name, filters in FILTERS.items():
        draws = SamplingBatch.of([(0.7, *filters, uniform) for uniform in rng.random(arguments.rows)])
        tokens, seconds = [], []
        for kept in (without_sorting, kept_by_sorting):
            sampling._kept = kept
            tokens.append(sampling.choose(logits, draws))
            seconds.append(best_seconds(lambda: sampling.choose(logits, draws), arguments.repeats))  # noqa: B023
        sampling._kept = without_sorting
        assert torch.equal(*tokens), "the tokens differ"
        print(f"{name:22} {seconds[0] * 1e3:8.1f} ms, {seconds[1] / seconds[0]:.1f} times as fast as sorting")


if __name__ == "__main__":
    main()
