"""Operations of a decoder layer besides matrix products: the interface, and its plain torch implementation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from neso.engine.runners.torch.adapters import AdapterStack
from neso.engine.runners.torch.kv_cache import LayerCache
from neso.engine.runners.torch.step_inputs import AdapterRows, StepInputs
from neso.engine.runners.torch.weights import Experts
from neso.engine.specs.decoder_spec import Activation

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


class Operations(Protocol):
    """Operations on T tokens. Activations are in the model's dtype, accumulation in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMS norm of x[T, width] with weight[width]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to residual, in place; return its RMS norm."""

    def rotate(
        self, heads: Tensor, positions: Tensor, cos_sin: Tensor, weight: Tensor | None, eps: float
    ) -> None:
        """Rotate heads[T, heads, head_dim] in place by rows of cos_sin float32[positions, rotary_dim].

        The first half of a row has the cosines, the second half the sines. With weight[head_dim], each head is
        normalized before the rotation.
        """

    def store(self, keys: Tensor, values: Tensor, slots: Tensor, cache: LayerCache) -> None:
        """Write keys[T, kv_heads, key_dim] and values[T, kv_heads, value_dim] at slots[T]."""

    def attention(
        self,
        queries: Tensor,
        cache: LayerCache,
        inputs: StepInputs,
        window: int | None,
        scale: float,
        softcap: float,
    ) -> Tensor:
        """Compute causal attention of queries[T, heads, key_dim] over the cache: [T, heads, value_dim].

        A token attends to `window` tokens, itself included, and the first `inputs.sinks` tokens; None: to all. A
        `softcap` above 0 caps the scores: softcap * tanh(score / softcap).
        """

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up for gate_up[T, 2 * width] with the gate in the first half."""

    def adapt(self, x: Tensor, y: Tensor, stack: AdapterStack, rows: AdapterRows) -> None:
        """Add scale * (x A^T) B^T of each row's adapter to y, for x[T, inputs] and y[T, outputs], in place."""

    def experts(
        self, x: Tensor, experts: Experts, chosen: Tensor, weights: Tensor, activation: Activation
    ) -> Tensor:
        """Return the weighted sums float32[T, hidden] of the experts' MLPs for x[T, hidden], without the shared expert.

        chosen int64[T, top_k] are the experts of each token, weights float32[T, top_k] their weights. The sums are in
        the order of the weights, so that a row's result does not depend on the rest of the batch.
        """


def loop_over_experts(
    operations: Operations,
    x: Tensor,
    experts: Experts,
    chosen: Tensor,
    weights: Tensor,
    activation: Activation,
) -> Tensor:
    """See `Operations.experts`; synchronizes with the host to read the number of rows of each expert."""
    tokens, top_k = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=experts.count).tolist()
    results = x.new_empty(len(order), x.shape[1])
    for expert, slots in enumerate(order.split(counts)):
        if len(slots):
            inner = operations.gated(experts.gate_up[expert](x[slots // top_k]), activation)
            results[slots] = experts.down[expert](inner)
    return torch.einsum("tkh,tk->th", results.view(tokens, top_k, x.shape[1]).float(), weights)


def rotate_pairs(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads[T, heads, head_dim] in place by cosines and sines float32[T, 1, rotary_dim / 2]."""
    half = cos.shape[-1]
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    heads[..., : 2 * half] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class PlainOperations:
    """Plain torch, one sequence at a time. Runs on any device; Triton kernels are tested against it."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (normed * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rotate(
        self, heads: Tensor, positions: Tensor, cos_sin: Tensor, weight: Tensor | None, eps: float
    ) -> None:
        if weight is not None:
            heads.copy_(self.rms_norm(heads, weight, eps))
        cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
        rotate_pairs(heads, cos, sin)

    def store(self, keys: Tensor, values: Tensor, slots: Tensor, cache: LayerCache) -> None:
        cache.keys.flatten(0, 1)[slots.long()] = keys
        cache.values.flatten(0, 1)[slots.long()] = values

    def attention(
        self,
        queries: Tensor,
        cache: LayerCache,
        inputs: StepInputs,
        window: int | None,
        scale: float,
        softcap: float,
    ) -> Tensor:
        plan, block_size = inputs.plan, cache.keys.shape[1]
        out = queries.new_empty(*queries.shape[:2], cache.values.shape[-1])
        for sequence in range(plan.num_sequences):
            start, end = plan.query_start[sequence : sequence + 2].tolist()
            computed = int(plan.num_computed[sequence])
            oldest = 0 if window is None else max(computed - window + 1, 0)
            sinks = min(inputs.sinks, oldest)
            context = computed + end - start
            at = torch.arange(oldest - sinks, context, device=queries.device)
            at[:sinks] -= oldest - sinks
            slots = inputs.block_tables[sequence].long()[at // block_size] * block_size + at % block_size
            keys, values = (part.flatten(0, 1)[slots] for part in (cache.keys, cache.values))
            positions, key_positions, mask = _positions_and_mask(inputs, sequence, at)
            if window is not None:
                mask &= (positions[:, None] - key_positions < window) | (at < inputs.sinks)
            out[start:end] = _attend(queries[start:end], keys, values, mask, scale, softcap)
        return out

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def adapt(self, x: Tensor, y: Tensor, stack: AdapterStack, rows: AdapterRows) -> None:
        for slot in rows.slots.unique().tolist():
            if slot < 0:
                continue
            own = (rows.slots == slot).nonzero()[:, 0]
            ranks, scales = stack.ranks[slot].tolist(), stack.scales[slot].tolist()
            first = 0
            for target, (rank, scale, width) in enumerate(zip(ranks, scales, stack.widths, strict=True)):
                a, b = stack.a[slot, target, :rank], stack.b[slot, first : first + width, :rank]
                y[:, first : first + width].index_add_(0, own, (x[own] @ a.T * scale) @ b.T)
                first += width

    def experts(
        self, x: Tensor, experts: Experts, chosen: Tensor, weights: Tensor, activation: Activation
    ) -> Tensor:
        return loop_over_experts(self, x, experts, chosen, weights, activation)


def _positions_and_mask(inputs: StepInputs, sequence: int, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions of the new tokens [count] and of the keys in slots `at` [keys], and the causal mask.

    The mask is bool[count, keys]. In a tree of draft tokens, a token attends to itself and its ancestors.
    """
    start, end = inputs.plan.query_start[sequence : sequence + 2].tolist()
    computed = int(inputs.plan.num_computed[sequence])
    written = torch.arange(computed, computed + end - start, device=at.device)
    causal = written[:, None] >= at
    masks, depths = inputs.tree_masks, inputs.tree_depths
    if masks is None or depths is None or not masks[start]:
        return written, at, causal
    node = at - computed
    is_node = node >= 0
    node = node.clamp(min=0)
    on_path = (masks[start:end, None] >> node[None]) & 1 != 0
    positions = computed + depths[start:end]
    return positions, torch.where(is_node, positions[node], at), causal & (~is_node | on_path)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float
) -> Tensor:
    """Compute queries[Q, heads, D], keys[L, kv_heads, D], values[L, kv_heads, E], mask bool[Q, L] -> [Q, heads, E]."""
    q, k, v = (part.transpose(0, 1) for part in (queries, keys, values))
    if not softcap and k.shape[-1] == v.shape[-1]:
        attended = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True
        )[0]
        return attended.transpose(0, 1)
    repeats = len(q) // len(k)
    k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    scores = (q.float() @ k.float().mT) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, -np.inf).softmax(dim=-1)
    return (weights @ v.float()).to(queries.dtype).transpose(0, 1)
