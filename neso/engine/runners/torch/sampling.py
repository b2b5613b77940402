"""Sampling on the device: `token_sampling.choose` and `token_scores.sample_and_score` in torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from neso.engine.runners.torch.step_inputs import send, send_together
from neso.engine.sampling.adjustments import LogitAdjustments
from neso.engine.sampling.token_sampling import INVALID_TOKEN, RowMasks, SamplingBatch
from neso.engine.sampling.token_scores import ScoreRequest


def choose(logits: Tensor, draws: SamplingBatch) -> Tensor:
    """Draw a token for each row of float32[R, V]; returns int32[R] on the device, INVALID_TOKEN if none is possible.

    Masks change the logits in place. Does not wait for a GPU.
    """
    if draws.masks is not None:
        _mask(logits, draws.masks)
    if logits.device.type == "cuda" and (draws.temperature > 0).any():
        from neso.engine.runners.torch.triton_sampling import sample

        return sample(logits, *sampling_parameters(draws, logits.device))
    tokens = logits.argmax(dim=1)
    # argmax of a row with NaN is the NaN's index, so checking the chosen logit detects such rows.
    broken = ~(logits.gather(1, tokens[:, None])[:, 0] > -torch.inf)
    random = np.flatnonzero(draws.temperature > 0)
    if len(random):
        chosen = draws.rows(random)
        rows = send(random, logits.device)
        tokens[rows] = _draw(_kept(_exponentials(logits[rows], chosen), chosen), chosen)
    return tokens.masked_fill(broken, INVALID_TOKEN).int()


def sample_and_score(
    logits: Tensor, draws: SamplingBatch, adjustments: LogitAdjustments | None, wanted: ScoreRequest | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Sample a token for each row of float32[R, V], which is changed.

    Returns int32[R] and the fields of `TokenScores`, without any if no scores are wanted. Does not wait for a GPU.
    """
    if wanted is None:
        apply_adjustments(logits, adjustments)
        return choose(logits, draws), ()
    rows, copied = (ids.long() for ids in send_together([wanted.rows, wanted.copied], logits.device))
    raw, copies = logits[rows], logits[copied]
    apply_adjustments(logits, adjustments)
    tokens = choose(logits, draws)
    drawn_from = logits[copied] if wanted.drawn_from else logits.new_empty(0, logits.shape[1])
    own = raw.gather(1, tokens[rows].clamp(min=0).long()[:, None])
    highest = raw.amax(dim=1, keepdim=True)
    log_mass = (raw - highest).exp().sum(dim=1, keepdim=True).log()
    top_ids = _most_likely(raw, min(wanted.count, raw.shape[1]))
    top_logprobs = raw.gather(1, top_ids) - highest - log_mass
    ranks = (raw > own).sum(dim=1, dtype=torch.int32) + 1
    logprobs = (own - highest - log_mass)[:, 0]
    return tokens, (logprobs, ranks, top_ids.int(), top_logprobs, copies, drawn_from)


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """Return the tokens int64[R, count] of the largest logits float32[R, V], best first, equal ones by token id."""
    vocab = logits.shape[1]
    # Integers that are ordered like the floats, with the token in the low bits.
    bits = (logits + 0.0).view(torch.int32)
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    keys = (ordered << 32) + torch.arange(vocab - 1, -1, -1, device=logits.device)
    return vocab - 1 - (keys.topk(count, dim=1).values & 0xFFFFFFFF)


def apply_adjustments(logits: Tensor, adjustments: LogitAdjustments | None) -> None:
    """Change float32[R, V] in place; see `LogitAdjustments.apply`."""
    if adjustments is None:
        return
    parts = [adjustments.penalized, adjustments.biased, adjustments.allowed, adjustments.banned]
    indices = [ids for cells in parts for ids in (cells.rows, cells.tokens)]
    values = [
        values.view(np.int32) for values in (adjustments.factors, adjustments.subtracted, adjustments.biases)
    ]
    whole_rows = [adjustments.dense_rows, np.unique(adjustments.allowed.rows)]
    sent = send_together([*indices, *values, *whole_rows], logits.device)
    penalized, biased, allowed, banned = (
        (sent[2 * i].long(), sent[2 * i + 1].long()) for i in range(len(parts))
    )
    factors, subtracted, biases = (part.view(torch.float32) for part in sent[8:11])
    if len(factors):
        before = logits[penalized]
        logits[penalized] = torch.where(before > 0, before / factors, before * factors) - subtracted
    if len(adjustments.dense_rows):
        logits[sent[11].long()] += send(adjustments.dense_biases, logits.device)
    if len(biases):
        logits[biased] += biases
    if len(adjustments.allowed):
        kept = logits[allowed]
        logits.index_fill_(0, sent[12].long(), -torch.inf)
        logits[allowed] = kept
    if len(adjustments.banned):
        logits[banned] = logits.new_full((), -torch.inf)


def sampling_parameters(draws: SamplingBatch, device: torch.device) -> tuple[Tensor, ...]:
    """Copy temperature, top_k, top_p, min_p and uniforms [R] to the device in one transfer."""
    columns = (draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniforms)
    sent = send_together([column.view(np.int32) for column in columns], device)
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float64)
    return tuple(values.view(kind) for values, kind in zip(sent, kinds, strict=True))


_MASKED_AT_ONCE = 64
"""Rows that are masked together: unpacked masks take more memory than their logits."""


def _mask(logits: Tensor, masks: RowMasks) -> None:
    """Set the logits of masked tokens to -inf; see `RowMasks`."""
    all_bits, all_rows = send(masks.bits, logits.device), send(masks.rows, logits.device).long()
    lanes = torch.arange(32, device=logits.device, dtype=torch.int32)
    for bits, rows in zip(all_bits.split(_MASKED_AT_ONCE), all_rows.split(_MASKED_AT_ONCE), strict=True):
        allowed = (bits[:, :, None] >> lanes & 1).flatten(1)[:, : logits.shape[1]].bool()
        logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def _exponentials(logits: Tensor, draws: SamplingBatch) -> Tensor:
    """Return the probabilities relative to the most likely token, float32[R, V]."""
    temperature = send(draws.temperature, logits.device)
    return ((logits - logits.amax(dim=1, keepdim=True)) * (1 / temperature)[:, None]).exp()


_NUM_CANDIDATES = 1024
"""Most likely tokens that are ordered for a row with top-p or min-p; more are ordered only for rows that need them."""


def _kept(weights: Tensor, draws: SamplingBatch) -> Tensor:
    """Set the weights excluded by top-k, then top-p, then min-p to 0; see `token_sampling.filter_weights`."""
    vocab = weights.shape[1]
    limited = (draws.top_k > 0) & (draws.top_k < vocab)
    filtered = limited | (draws.top_p < 1) | (draws.min_p > 0)
    if not filtered.any():
        return weights
    count = int(draws.top_k[limited].max(initial=0))
    if not limited[filtered].all():
        count = max(count, _NUM_CANDIDATES)
    threshold, ties, complete = _thresholds(weights, min(count, vocab), draws)
    short = np.flatnonzero(filtered & ~complete.numpy())
    if len(short):
        rows = torch.from_numpy(short)
        threshold[rows], ties[rows], _ = _thresholds(weights[rows], vocab, draws.rows(short))
    threshold[torch.from_numpy(~filtered)] = 0.0
    equal = weights == threshold
    kept = weights >= threshold
    # Where not all ties are kept, the first ones are.
    split = torch.from_numpy(np.flatnonzero(filtered & (equal.sum(dim=1) > ties).numpy()))
    if len(split):
        extra = equal[split] & (equal[split].cumsum(dim=1, dtype=torch.int32) > ties[split, None])
        kept[split] &= ~extra
    return weights.masked_fill(~kept, 0)


def _thresholds(weights: Tensor, count: int, draws: SamplingBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Find the kept weights among the `count` largest of each row.

    Returns the smallest kept weight float32[R, 1], how many of the weights that equal it are kept int64[R], and whether
    no smaller weight could be kept bool[R].
    """
    device, vocab = weights.device, weights.shape[1]
    top_k = send(np.where(draws.top_k > 0, draws.top_k, vocab), device)[:, None]
    top_p = send(draws.top_p, device).double()[:, None]
    min_p = send(draws.min_p, device)[:, None]
    ordered = weights.topk(count, dim=1).values
    in_top_k = torch.arange(count, device=device) < top_k
    mass = ordered.masked_fill(~in_top_k, 0).cumsum(dim=1, dtype=torch.float64)
    total = torch.where(top_k <= count, mass[:, -1:], weights.sum(dim=1, keepdim=True, dtype=torch.float64))
    in_top_p = (mass - ordered < top_p * total) | (top_p >= 1)
    keep = in_top_k & in_top_p & (ordered >= min_p * ordered[:, :1])
    keep[:, 0] = True
    last = keep.sum(dim=1, keepdim=True) - 1
    threshold = ordered.gather(1, last)
    ties = (keep & (ordered == threshold)).sum(dim=1)
    return threshold, ties, (last < count - 1)[:, 0] | (top_k <= count)[:, 0] | (count == vocab)


def _draw(weights: Tensor, draws: SamplingBatch) -> Tensor:
    """Draw an index from each row by inverse transform sampling, int64[R]."""
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    targets = send(draws.uniforms, weights.device)[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return found.clamp(max=weights.shape[1] - 1)
