"""Sampling on the device: `token_sampling.choose` in torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from neso.engine.runners.torch.step_inputs import send
from neso.engine.sampling.token_sampling import INVALID_TOKEN, RowMasks, SamplingBatch


def choose(logits: Tensor, draws: SamplingBatch) -> Tensor:
    """Draw a token for each row of float32[R, V]; returns int32[R] on the device, INVALID_TOKEN if none is possible.

    Masks change the logits in place.
    """
    if draws.masks is not None:
        _mask(logits, draws.masks)
    tokens = logits.argmax(dim=1)
    # argmax of a row with NaN is the NaN's index, so checking the chosen logit detects such rows.
    broken = ~(logits.gather(1, tokens[:, None])[:, 0] > -torch.inf)
    random = np.flatnonzero(draws.temperature > 0)
    if len(random):
        chosen = draws.rows(random)
        rows = send(random, logits.device)
        tokens[rows] = _draw(_kept(_exponentials(logits[rows], chosen), chosen), chosen)
    return torch.where(broken, INVALID_TOKEN, tokens).int()


def _mask(logits: Tensor, masks: RowMasks) -> None:
    """Set the logits of masked tokens to -inf; see `RowMasks`."""
    bits, rows = send(masks.bits, logits.device), send(masks.rows, logits.device).long()
    lanes = torch.arange(32, device=logits.device, dtype=torch.int32)
    allowed = (bits[:, :, None] >> lanes & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def _exponentials(logits: Tensor, draws: SamplingBatch) -> Tensor:
    """Return the probabilities relative to the most likely token, float32[R, V]."""
    temperature = send(draws.temperature, logits.device)
    return ((logits - logits.amax(dim=1, keepdim=True)) * (1 / temperature)[:, None]).exp()


def _kept(weights: Tensor, draws: SamplingBatch) -> Tensor:
    """Set the weights excluded by top-k, then top-p, then min-p to 0; see `token_sampling.filter_weights`."""
    if not (draws.top_k.any() or (draws.top_p < 1).any() or draws.min_p.any()):
        return weights
    device, vocab = weights.device, weights.shape[1]
    top_k = send(np.where(draws.top_k > 0, draws.top_k, vocab), device)
    top_p = send(draws.top_p, device).double()[:, None]
    min_p = send(draws.min_p, device)
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    in_top_k = torch.arange(vocab, device=device) < top_k[:, None]
    mass = ordered.masked_fill(~in_top_k, 0).cumsum(dim=1, dtype=torch.float64)
    in_top_p = (mass - ordered < top_p * mass[:, -1:]) | (top_p >= 1)
    keep = in_top_k & in_top_p & (ordered >= min_p[:, None] * ordered[:, :1])
    keep[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, order, ordered.masked_fill(~keep, 0))


def _draw(weights: Tensor, draws: SamplingBatch) -> Tensor:
    """Draw an index from each row by inverse transform sampling, int64[R]."""
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    targets = send(draws.uniforms, weights.device)[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return found.clamp(max=weights.shape[1] - 1)
