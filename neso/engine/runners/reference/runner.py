"""The reference runner: plain NumPy in float32, used to test the other runners.

Its arithmetic (products, norms, activations, rotary embeddings, attention, experts, adapters) is independent: this
package and the native, torch and transformers runners do not use each other. Only data is shared: specs, step plans,
and checkpoint tensors, whose dequantization is tested separately. lint-imports checks both directions.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from neso.engine.addons.image_positions import rotary_positions
from neso.engine.addons.input_embeddings import EmbeddingPlan
from neso.engine.core.step_plan import StepPlan
from neso.engine.lora.adapter import LoraAdapter, output_widths
from neso.engine.parallel.communicator import Communicator
from neso.engine.parallel.sharding import Shard, open_tensors, shard_adapter, shard_of
from neso.engine.pooling.pooler import PoolingPlan
from neso.engine.runners.base import CacheLayout, Capability, PackedAdapter, SpecRunner
from neso.engine.runners.reference.attention import AttentionPlan, KVCache, attend
from neso.engine.runners.reference.layers import (
    AdapterBatch,
    Float32Adapter,
    layer_norm,
    linear,
    rms_norm,
    run_mlp,
    softcap,
)
from neso.engine.runners.reference.rotary import cos_sin, rotate
from neso.engine.runners.reference.weights import DecoderWeights, LayerWeights, NormWeights
from neso.engine.runners.runner_options import DEFAULT_OPTIONS, RunnerOptions, UnsupportedOption
from neso.engine.runners.shared_cache import CacheFormat
from neso.engine.spec_decode.draft import DraftTreePlan, token_positions
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.weights.source import TensorSource

Float32Array = npt.NDArray[np.float32]


class ReferenceRunner(SpecRunner):
    """Holds the weights and the KV cache of a shard. Not thread-safe."""

    capabilities: frozenset[Capability] = frozenset(
        {
            "attention_sinks",
            "hidden_states",
            "input_embeddings",
            "lora",
            "ranks",
            "shared_cache",
            "tree_attention",
        }
    )

    def __init__(self, shard: Shard, weights: DecoderWeights) -> None:
        super().__init__(shard.whole)
        self._shard = shard
        self._spec = spec = shard.spec
        self._ranks = _Ranks(shard, None)
        self._weights = weights
        self._cache: KVCache | None = None
        self._adapters: dict[int, Float32Adapter] = {}  # by slot
        self._widths = output_widths(spec)
        self._hidden = np.empty((0, spec.hidden_size), np.float32)

    @classmethod
    def load(
        cls, spec: DecoderSpec, source: TensorSource, options: RunnerOptions = DEFAULT_OPTIONS
    ) -> ReferenceRunner:
        if options.quantization is not None or options.dtype not in ("auto", "float32"):
            raise UnsupportedOption(
                "the reference runner computes in float32 and does not quantize; dtype and quantization "
                "need the native runner"
            )
        shard = shard_of(spec, options.layout)
        return cls(shard, DecoderWeights.load(open_tensors(shard, source)))

    def connect(self, communicator: Communicator) -> None:
        self._ranks = _Ranks(self._shard, communicator)

    def allocate_cache(self, layout: CacheLayout) -> None:
        self._cache = KVCache(self._spec, layout)
        self.shared_cache = self._cache.shared
        spec = self._spec
        self.cache_format = CacheFormat("heads", "float32", spec.num_layers, spec.num_kv_heads, spec.head_dim)

    def cache_bytes_per_block(self, block_size: int) -> int:
        return KVCache.bytes_per_block(self._spec, block_size)

    def step(self, plan: StepPlan) -> Float32Array:
        if self._cache is None:
            raise RuntimeError("allocate_cache must come before the first step")
        self._cache.copy_blocks(plan.block_copies)
        tree = plan.part(DraftTreePlan)
        if tree is not None:
            self._cache.copy_slots(*tree.copied_slots(plan, self._cache.block_size))
        adapters = AdapterBatch(plan, self._adapters, self._widths)
        state = _StepState(self._shard, self._ranks, plan, self._cache, adapters)
        spec, weights = self._spec, self._weights
        if spec.has_embedding:
            x = self._embed(plan)
        else:
            x = self._ranks.receive(plan.num_tokens)
        for index, layer in enumerate(weights.layers):
            x = self._run_layer(state, index, layer, x)
        if not spec.has_head:
            self._ranks.send(x)
            return np.empty((0, self.vocab_size), np.float32)
        assert weights.lm_head is not None
        self._row_states = _norm(spec, x[plan.logits_rows], weights.final_norm)
        pooling = plan.part(PoolingPlan)
        if pooling is not None:
            self._hidden = _norm(spec, x[pooling.rows], weights.final_norm)
        logits = linear(self._row_states, weights.lm_head, weights.lm_head_bias)
        if spec.logit_scale != 1.0:
            logits *= np.float32(spec.logit_scale)
        if spec.logit_softcap is not None:
            logits = softcap(logits, spec.logit_softcap)
        return self._ranks.gather(logits)

    def pack_adapter(self, adapter: LoraAdapter) -> PackedAdapter:
        return Float32Adapter.convert(shard_adapter(adapter, self._shard))

    def set_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        self._adapters.pop(slot, None)
        if adapter is not None:
            assert isinstance(adapter, Float32Adapter)
            self._adapters[slot] = adapter

    def hidden_states(self) -> Float32Array:
        return self._hidden

    def keep_row_states(self) -> None:
        """Do nothing: row states are always kept."""

    def row_states(self, rows: list[int]) -> Float32Array:
        return self._row_states[rows]

    def _embed(self, plan: StepPlan) -> Float32Array:
        spec, weights = self._spec, self._weights
        assert weights.embedding is not None
        ids = plan.token_ids - self._shard.vocabulary.start
        own = (ids >= 0) & (ids < spec.vocab_size)
        # Rows of other ranks are zero here.
        x: Float32Array = weights.embedding[np.where(own, ids, 0)] * own[:, None].astype(np.float32)
        self._ranks.sum(x)
        if spec.embedding_scale != 1.0:
            x *= np.float32(spec.embedding_scale)
        embeddings = plan.part(EmbeddingPlan)
        if embeddings is not None:
            x[embeddings.positions] = embeddings.rows
        if weights.position_embedding is not None and spec.position_offset is not None:
            x += weights.position_embedding[token_positions(plan) + spec.position_offset]
        return x

    def _run_layer(self, state: _StepState, index: int, layer: LayerWeights, x: Float32Array) -> Float32Array:
        """Return the residual stream float32[T, hidden] after the layer."""
        spec, norms = self._spec, layer.norms
        normed = _norm(spec, x, norms.get("attention_norm"))
        attended = self._branch(state.attention(index, layer, normed), norms.get("attention_post_norm"))
        if not spec.parallel:
            x = _norm(spec, x + attended, norms.get("attention_sum_norm"))
        if "mlp_norm" in norms or not spec.parallel:
            normed = _norm(spec, x, norms.get("mlp_norm"))
        adapt = partial(state.adapters.adapt, index)
        result = self._branch(run_mlp(spec, layer.mlp, normed, adapt), norms.get("mlp_post_norm"))
        return x + attended + result if spec.parallel else _norm(spec, x + result, norms.get("mlp_sum_norm"))

    def _branch(self, result: Float32Array, post_norm: NormWeights | None) -> Float32Array:
        """Return the branch's contribution to the residual stream: its results on all ranks are summed."""
        self._ranks.sum(result)
        result = _norm(self._spec, result, post_norm)
        return result if self._spec.residual_scale == 1.0 else result * np.float32(self._spec.residual_scale)


def _norm(spec: DecoderSpec, x: Float32Array, weights: NormWeights | None) -> Float32Array:
    """Normalize x; return x unchanged if there is no such norm."""
    if weights is None:
        return x
    if spec.norm == "rms":
        return rms_norm(x, weights.weight, spec.norm_eps)
    return layer_norm(x, weights.weight, weights.bias, spec.norm_eps)


class _Ranks:
    """Communication of a shard with the other ranks. All operations of a single rank do nothing."""

    def __init__(self, shard: Shard, communicator: Communicator | None) -> None:
        self._layout = shard.layout
        self._width = shard.whole.hidden_size
        self._communicator = communicator

    @property
    def _connected(self) -> Communicator:
        if self._communicator is None:
            raise RuntimeError("connect must come before the first step of a runner on several ranks")
        return self._communicator

    def sum(self, values: Float32Array) -> None:
        """Replace the values by their sum over the tensor-parallel ranks."""
        if self._layout.tensor_parallel > 1:
            self._connected.all_reduce(values)

    def gather(self, logits: Float32Array) -> Float32Array:
        """Return the logits of the whole vocabulary on the first rank; on others an array without rows."""
        if self._layout.tensor_parallel == 1:
            return logits
        parts = self._connected.gather(logits)
        return logits[:0] if parts is None else np.concatenate(parts, axis=1)

    def send(self, x: Float32Array) -> None:
        self._connected.send(np.ascontiguousarray(x), self._layout.next)

    def receive(self, num_tokens: int) -> Float32Array:
        x = np.empty((num_tokens, self._width), np.float32)
        self._connected.receive(x, self._layout.previous)
        return x


class _StepState:
    """Per-step state shared by all layers: cache slots, rotations, attention plans, adapters."""

    def __init__(
        self,
        shard: Shard,
        ranks: _Ranks,
        plan: StepPlan,
        cache: KVCache,
        adapters: AdapterBatch,
    ) -> None:
        self.adapters = adapters
        self._shard = shard
        self._ranks = ranks
        self._spec = spec = shard.spec
        self._cache = cache
        self._slots = plan.slots(cache.block_size)
        positions = rotary_positions(plan, token_positions(plan))
        self._cos_sin = {rotary: cos_sin(rotary, positions) for rotary in set(spec.rotaries) if rotary}
        self._attention = {
            window: AttentionPlan.make(plan, cache.block_size, window, spec.sink_tokens)
            for window in set(spec.sliding_windows)
        }

    def attention(self, index: int, layer: LayerWeights, x: Float32Array) -> Float32Array:
        """Compute attention of normed x float32[T, hidden] in layer `index`; writes the new keys and values first."""
        spec = self._spec
        projected = linear(x, layer.qkv, layer.qkv_bias)
        self.adapters.adapt(index, ("query", "key", "value"), x, projected)
        qkv = projected.reshape(len(x), -1, spec.head_dim)
        queries, keys = qkv[:, : spec.num_heads], qkv[:, spec.num_heads : -spec.num_kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            if spec.qk_norm == "width":
                self._norm_width(queries, layer.query_norm, keys, layer.key_norm)
            else:
                queries[...] = rms_norm(queries, layer.query_norm, spec.norm_eps)
                keys[...] = rms_norm(keys, layer.key_norm, spec.norm_eps)
        rotary = spec.rotaries[index]
        if rotary is not None:
            rotate(qkv[:, : -spec.num_kv_heads], *self._cos_sin[rotary])
        self._cache.write(index, self._slots, qkv[:, spec.num_heads :])
        attended = np.empty_like(queries, order="C")
        plan = self._attention[spec.sliding_windows[index]]
        attend(plan, queries, self._cache, index, spec.attention_scale, spec.attention_softcap, attended)
        attended = attended.reshape(len(x), -1)
        out = linear(attended, layer.output, layer.output_bias)
        self.adapters.adapt(index, ("output",), attended, out)
        return out

    def _norm_width(
        self, queries: Float32Array, query_norm: Float32Array, keys: Float32Array, key_norm: Float32Array
    ) -> None:
        """Normalize float32[T, heads, head_dim] in place, over the heads of a token on all ranks."""
        whole, eps = self._shard.whole, np.float32(self._spec.norm_eps)
        squares = np.stack([np.einsum("thd,thd->t", heads, heads) for heads in (queries, keys)])
        if not self._shard.owns_kv_heads:
            squares[1] = 0
        self._ranks.sum(squares)
        for heads, sums, count, weight in (
            (queries, squares[0], whole.num_heads, query_norm),
            (keys, squares[1], whole.num_kv_heads, key_norm),
        ):
            mean = sums / np.float32(count * whole.head_dim)
            heads /= np.sqrt(mean + eps)[:, None, None]
            heads *= weight.reshape(heads.shape[1:])
