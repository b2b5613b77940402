"""Sampling as a Triton kernel: a program reads the logits of a row several times, and sorts nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _weights(base, start, vocab, highest, factor, BLOCK: tl.constexpr):
    """Return the columns of a block and their probabilities relative to the most likely token; 0 outside the row."""
    columns = start + tl.arange(0, BLOCK)
    logits = tl.load(base + columns, mask=columns < vocab, other=float("-inf"))
    return columns, tl.exp((logits - highest) * factor)


@triton.jit
def _above(base, vocab, highest, factor, bits, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum (or the number, with COUNT) of the weights that are larger than the float32 with these bits."""
    threshold = bits.to(tl.float32, bitcast=True)
    total = tl.zeros((), tl.float64)
    for start in range(0, vocab, BLOCK):
        _, weights = _weights(base, start, vocab, highest, factor, BLOCK)
        values = tl.where(weights > threshold, 1.0 if COUNT else weights, 0.0)
        total += tl.sum(values.to(tl.float64), axis=0)
    return total


@triton.jit
def _threshold(base, vocab, highest, factor, low, limit, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bits of the smallest weight, from `low` on, for which `_above` is less than `limit`.

    The bits of nonnegative floats are ordered like the floats. Each pass over the row divides the interval by four.
    """
    high = low * 0 + 0x3F800000  # 1.0, the largest weight
    while low < high:
        quarter = (high - low) // 4
        one, two, three = low + quarter, low + 2 * quarter, low + 3 * quarter
        first = one.to(tl.float32, bitcast=True)
        second = two.to(tl.float32, bitcast=True)
        third = three.to(tl.float32, bitcast=True)
        above_one = tl.zeros((), tl.float64)
        above_two = tl.zeros((), tl.float64)
        above_three = tl.zeros((), tl.float64)
        for start in range(0, vocab, BLOCK):
            _, weights = _weights(base, start, vocab, highest, factor, BLOCK)
            values = tl.where(weights > first, 1.0 if COUNT else weights, 0.0).to(tl.float64)
            above_one += tl.sum(values, axis=0)
            values = tl.where(weights > second, values, 0.0)
            above_two += tl.sum(values, axis=0)
            above_three += tl.sum(tl.where(weights > third, values, 0.0), axis=0)
        next_low = tl.where(above_two < limit, one + 1, tl.where(above_three < limit, two + 1, three + 1))
        next_high = tl.where(above_two < limit, two, tl.where(above_three < limit, three, high))
        low = tl.where(above_one < limit, low, next_low)
        high = tl.where(above_one < limit, one, next_high)
    return low


@triton.jit
def _sample(
    tokens,
    logits,
    row_stride,
    vocab,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    highest = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    num_nan = tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(base + columns, mask=columns < vocab, other=float("-inf"))
        num_nan += tl.sum((values != values).to(tl.int32), axis=0)
        found = tl.max(values, axis=0)
        first = tl.min(tl.where(values == found, columns, vocab), axis=0)
        token = tl.where(found > highest, first, token)
        highest = tl.maximum(found, highest)
    valid = (num_nan == 0) & (highest > float("-inf"))
    temperature = tl.load(temperatures + row)
    if valid & (temperature > 0):
        factor = 1.0 / temperature
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row).to(tl.float64)
        min_p = tl.load(min_ps + row)
        # Kept are the weights above a threshold, and the first `num_ties` that equal it.
        bits, num_ties = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + vocab
        if (top_k > 0) & (top_k < vocab):
            limit = top_k.to(tl.float64)
            bits = _threshold(base, vocab, highest, factor, bits, limit, True, BLOCK)
            num_ties = top_k - _above(base, vocab, highest, factor, bits, True, BLOCK).to(tl.int32)
        if top_p < 1:
            above = _above(base, vocab, highest, factor, bits, False, BLOCK)
            tie = bits.to(tl.float32, bitcast=True).to(tl.float64)
            limit = top_p * (above + num_ties * tie)
            top_k_bits = bits
            bits = _threshold(base, vocab, highest, factor, bits, limit, False, BLOCK)
            above = _above(base, vocab, highest, factor, bits, False, BLOCK)
            tie = bits.to(tl.float32, bitcast=True).to(tl.float64)
            num_ties = tl.where(bits == top_k_bits, num_ties, vocab)
            fitting = tl.ceil((limit - above) / tl.maximum(tie, 1e-300))
            num_ties = tl.minimum(fitting, num_ties.to(tl.float64)).to(tl.int32)
        threshold = bits.to(tl.float32, bitcast=True)
        total = tl.zeros((), tl.float64)
        for start in range(0, vocab, BLOCK):
            _, weights = _weights(base, start, vocab, highest, factor, BLOCK)
            kept = (weights > threshold) & (weights >= min_p)
            total += tl.sum(tl.where(kept, weights, 0.0).to(tl.float64), axis=0)
        tie_weight = tl.where(threshold >= min_p, threshold, 0.0).to(tl.float64)
        target = tl.load(uniforms + row) * (total + num_ties * tie_weight)
        before = tl.zeros((), tl.float64)
        ties_before = tl.full((), 0, tl.int32)
        start, last = 0, tl.full((), 0, tl.int32)
        token = vocab + token * 0
        while (start < vocab) & (token == vocab):
            columns, weights = _weights(base, start, vocab, highest, factor, BLOCK)
            ties = (weights == threshold).to(tl.int32)
            ranks = ties_before + tl.cumsum(ties, axis=0)
            kept = ((weights > threshold) | ((ties > 0) & (ranks <= num_ties))) & (weights >= min_p)
            drawn = tl.where(kept, weights, 0.0).to(tl.float64)
            reached = before + tl.cumsum(drawn, axis=0) > target
            token = tl.min(tl.where(reached & (drawn > 0), columns, vocab), axis=0)
            last = tl.maximum(last, tl.max(tl.where(drawn > 0, columns, 0), axis=0))
            before += tl.sum(drawn, axis=0)
            ties_before += tl.sum(ties, axis=0)
            start += BLOCK
        # Rounding of the sums may leave the target at the total.
        token = tl.where(token == vocab, last, token)
    tl.store(tokens + row, tl.where(valid, token, -1))


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """Return `token_sampling.choose` of logits float32[R, V] and parameters [R] as int32[R], on the device."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        _sample[(rows,)](
            tokens,
            logits,
            logits.stride(0),
            vocab,
            temperature,
            top_k,
            top_p,
            min_p,
            uniforms,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return tokens
