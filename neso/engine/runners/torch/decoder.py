"""The forward pass of a decoder in torch: layers, attention, MLPs and experts of a spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from neso.engine.lora.adapter import Target
from neso.engine.parallel.sharding import Shard
from neso.engine.runners.torch.adapters import AdapterSlots
from neso.engine.runners.torch.kv_cache import KVCache, LayerCache
from neso.engine.runners.torch.operations import ACTIVATIONS, Operations
from neso.engine.runners.torch.ranks import Ranks
from neso.engine.runners.torch.step_inputs import StepInputs, send
from neso.engine.runners.torch.weights import MLP, DecoderWeights, Experts, LayerWeights, Norm
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.rotary_spec import RotarySpec

Adapt = Callable[[tuple[Target, ...], Tensor, Tensor], Tensor]
"""(targets, x, y): returns y, the product of x with the matrices of `targets`, plus the adapters' updates."""


Rotation = tuple[Tensor, Tensor]
"""For each token, the row int32[T] of the cosines and sines float32[positions, rotary_dim]."""

_POST_NORMS = frozenset({"attention_post_norm", "mlp_post_norm"})


def _no_adapters(targets: tuple[Target, ...], x: Tensor, y: Tensor) -> Tensor:
    return y


def run_mlp(
    spec: DecoderSpec,
    operations: Operations,
    weights: MLP | Experts,
    x: Tensor,
    adapt: Adapt = _no_adapters,
) -> Tensor:
    """Return the output [T, hidden] for normed x[T, hidden]. Adapters do not apply to experts."""
    if isinstance(weights, Experts):
        return _run_experts(spec, operations, weights, x)
    inner = adapt(("gate", "up") if spec.gated else ("up",), x, weights.gate_up(x))
    activated = (
        operations.gated(inner, spec.activation) if spec.gated else ACTIVATIONS[spec.activation](inner)
    )
    return adapt(("down",), activated, weights.down(activated))


def _run_experts(spec: DecoderSpec, operations: Operations, weights: Experts, x: Tensor) -> Tensor:
    """Run the `top_k` most probable experts of each row, and the shared expert."""
    experts = spec.experts
    assert experts is not None
    scores = weights.router(x).float()
    expert_weights, chosen = scores[:, : experts.count].softmax(dim=-1).topk(experts.top_k, dim=-1)
    if experts.normalized:
        expert_weights = expert_weights / expert_weights.sum(dim=-1, keepdim=True)
    total = operations.experts(x, weights, chosen, expert_weights, spec.activation)
    if weights.shared is not None:
        shared = run_mlp(spec, operations, weights.shared, x).float()
        total += shared * scores[:, experts.count :].sigmoid() if experts.shared_gated else shared
    return total.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Forward pass of the shard of a decoder.

    `cos_sin`: for each layer, cosines, then sines of each position, float32[max_position, rotary_dim]; or None.
    """

    shard: Shard
    weights: DecoderWeights
    operations: Operations
    cos_sin: Sequence[Tensor | None]
    adapters: AdapterSlots
    ranks: Ranks

    @property
    def spec(self) -> DecoderSpec:
        return self.shard.spec

    def forward(self, inputs: StepInputs, cache: KVCache) -> Tensor:
        """Return the logits of `final_states`; writes the new keys and values layer by layer."""
        return self.logits(self.final_states(inputs, cache))

    def logits(self, states: Tensor) -> Tensor:
        """Return logits float32[R, vocab_size] for rows of `final_states`, no rows on other ranks than 0."""
        spec = self.spec
        if self.weights.lm_head is None:
            return states.new_empty((0, self.shard.whole.vocab_size), dtype=torch.float32)
        logits = self.weights.lm_head(states).float()
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return self.ranks.gather(logits)

    def final_states(self, inputs: StepInputs, cache: KVCache) -> Tensor:
        """Return the normalized final hidden states of the requested tokens, [R + H, hidden].

        A stage without head sends the hidden states of all tokens to the next stage, and returns them.
        """
        spec, layers = self.spec, self.weights.layers
        if spec.has_embedding:
            residual = self._embed(inputs)
        else:
            residual = self.ranks.receive(len(inputs.token_ids), self.weights.dtype)
        rotations = self._rotations(inputs)
        # Both branches of a parallel layer are summed over the ranks at once, if no norm is between.
        at_once = spec.parallel and not _POST_NORMS.intersection(spec.layer_norms)
        x = self._norm(residual, layers[0].norms.get("attention_norm"))
        for index, layer in enumerate(layers):
            last = index + 1 == len(layers)
            attended = self._attention(x, index, layer, inputs, rotations[index], cache.layers[index])
            if last and spec.has_head and inputs.logits_rows is not None:
                # After writing keys and values, the last layer is only computed for the requested tokens.
                rows = inputs.logits_rows
                attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
                x = x.index_select(0, rows) if spec.parallel else x
            adapt = partial(self._adapt, index, inputs)
            projected = adapt(("output",), attended, layer.output(attended))
            branch = self._branch(projected, layer.norms.get("attention_post_norm"), summed=at_once)
            if not spec.parallel:
                residual, x = self._add_norm(
                    branch, residual, layer.norms.get("attention_sum_norm"), layer.norms.get("mlp_norm")
                )
            elif "mlp_norm" in layer.norms:
                x = self._norm(residual, layer.norms["mlp_norm"])
            result = self._branch(
                run_mlp(spec, self.operations, layer.mlp, x, adapt),
                layer.norms.get("mlp_post_norm"),
                summed=at_once,
            )
            if spec.parallel:
                result = result + branch
            if at_once:
                self.ranks.sum(result)
            next_norm = self.weights.final_norm if last else layers[index + 1].norms.get("attention_norm")
            residual, x = self._add_norm(result, residual, layer.norms.get("mlp_sum_norm"), next_norm)
        if not spec.has_head:
            self.ranks.send(x)
        return x

    def _embed(self, inputs: StepInputs) -> Tensor:
        spec, weights = self.spec, self.weights
        assert weights.embedding is not None
        if self.shard.layout.tensor_parallel == 1:
            x = functional.embedding(inputs.token_ids, weights.embedding)
        else:
            ids = inputs.token_ids - self.shard.vocabulary.start
            own = (ids >= 0) & (ids < spec.vocab_size)
            # Rows of other ranks are zero here.
            x = functional.embedding(ids.masked_fill(~own, 0), weights.embedding) * own[:, None]
            self.ranks.sum(x)
        if spec.embedding_scale != 1.0:
            # The scale is rounded to the dtype first, as in training.
            x = x * float(torch.tensor(spec.embedding_scale, dtype=x.dtype))
        if inputs.embeddings is not None and inputs.embedding_positions is not None:
            x.index_copy_(0, inputs.embedding_positions.long(), inputs.embeddings.to(x.dtype))
        if weights.positions is not None and spec.position_offset is not None:
            x = x + functional.embedding(inputs.positions + spec.position_offset, weights.positions)
        return x

    def _rotations(self, inputs: StepInputs) -> list[Rotation | None]:
        """Return the rotation of each layer."""
        positions = inputs.positions
        if positions.ndim == 1:
            return [None if table is None else (positions, table) for table in self.cos_sin]
        # The rows of each token are put together from those of its positions on the three axes.
        rows = torch.arange(positions.shape[1], dtype=torch.int32, device=positions.device)
        tables: dict[RotarySpec, Tensor] = {}
        for rotary, table in zip(self.spec.rotaries, self.cos_sin, strict=True):
            if rotary is not None and table is not None and rotary not in tables:
                axes = send(np.tile(rotary.axes(), 2), positions.device)
                tables[rotary] = table.gather(0, positions[axes].T.long())
        return [None if rotary is None else (rows, tables[rotary]) for rotary in self.spec.rotaries]

    def _norm(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Normalize x; return x unchanged if there is no such norm."""
        if norm is None:
            return x
        if self.spec.norm == "rms":
            return self.operations.rms_norm(x, norm.weight, self.spec.norm_eps)
        return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, self.spec.norm_eps)

    def _add_norm(
        self, branch: Tensor, residual: Tensor, sum_norm: Norm | None, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Return sum_norm(residual + branch) and the norm of that. May overwrite residual."""
        if sum_norm is None and norm is not None and self.spec.norm == "rms":
            normed = self.operations.add_rms_norm(branch, residual, norm.weight, self.spec.norm_eps)
            return residual, normed
        residual += branch
        residual = self._norm(residual, sum_norm)
        return residual, self._norm(residual, norm)

    def _branch(self, result: Tensor, post_norm: Norm | None, summed: bool) -> Tensor:
        """Return the branch's contribution to the residual stream.

        `summed`: the caller sums it over the ranks.
        """
        if not summed:
            self.ranks.sum(result)
        result = self._norm(result, post_norm)
        return result if self.spec.residual_scale == 1.0 else result * self.spec.residual_scale

    def _adapt(
        self, index: int, inputs: StepInputs, targets: tuple[Target, ...], x: Tensor, y: Tensor
    ) -> Tensor:
        """Return y, the product with x, plus the updates of the batch's adapters."""
        if inputs.adapters is not None:
            # After attention, the last layer computes only the requested rows.
            last = index + 1 == len(self.weights.layers)
            requested_only = "query" not in targets and last and self.spec.has_head
            rows = inputs.output_adapters if requested_only else inputs.adapters
            assert rows is not None
            self.operations.adapt(x, y, self.adapters.layers[index][targets], rows)
        return y

    def _attention(
        self,
        x: Tensor,
        index: int,
        layer: LayerWeights,
        inputs: StepInputs,
        rotation: Rotation | None,
        cache: LayerCache,
    ) -> Tensor:
        spec, ops = self.spec, self.operations
        qkv = self._adapt(index, inputs, ("query", "key", "value"), x, layer.qkv(x))
        qkv = qkv.view(len(x), -1, spec.head_dim)
        queries, keys, values = qkv.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        norms = layer.query_norm, layer.key_norm
        if spec.qk_norm == "width" and self.shard.layout.tensor_parallel > 1:
            self._norm_width(queries, layer.query_norm, keys, layer.key_norm)
            norms = None, None
        elif rotation is None or spec.qk_norm == "width":
            self._norm_heads(queries, layer.query_norm)
            self._norm_heads(keys, layer.key_norm)
            norms = None, None
        if rotation is not None and norms == (None, None):
            # Queries and keys are adjacent: one launch for both.
            ops.rotate(qkv[:, : -spec.num_kv_heads], *rotation, None, spec.norm_eps)
        elif rotation is not None:
            ops.rotate(queries, *rotation, norms[0], spec.norm_eps)
            ops.rotate(keys, *rotation, norms[1], spec.norm_eps)
        ops.store(keys, values, inputs.slots, cache)
        window, softcap = spec.sliding_windows[index], spec.attention_softcap or 0.0
        attended = ops.attention(queries, cache, inputs, window, spec.attention_scale, softcap)
        return attended.flatten(1)

    def _norm_width(
        self, queries: Tensor, query_norm: Tensor | None, keys: Tensor, key_norm: Tensor | None
    ) -> None:
        """Normalize [T, heads, head_dim] in place, over the heads of a token on all ranks."""
        assert query_norm is not None and key_norm is not None
        whole = self.shard.whole
        squares = torch.stack([heads.float().square().sum(dim=(1, 2)) for heads in (queries, keys)])
        if not self.shard.owns_kv_heads:
            squares[1].zero_()
        self.ranks.sum(squares)
        for heads, sums, count, weight in (
            (queries, squares[0], whole.num_heads, query_norm),
            (keys, squares[1], whole.num_kv_heads, key_norm),
        ):
            factor = (sums / (count * whole.head_dim) + whole.norm_eps).rsqrt()
            heads.copy_(heads.float() * factor[:, None, None] * weight.float().view(heads.shape[1:]))

    def _norm_heads(self, heads: Tensor, weight: Tensor | None) -> None:
        """Normalize [T, heads, head_dim] in place, per head or over all heads of a token."""
        if weight is not None:
            rows = heads.reshape(-1, len(weight))
            heads.copy_(self.operations.rms_norm(rows, weight, self.spec.norm_eps).view(heads.shape))
