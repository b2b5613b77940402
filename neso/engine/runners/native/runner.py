"""The native runner: C++ kernels on the CPU, one call per step."""

from __future__ import annotations

import logging
import threading

import numpy as np
import numpy.typing as npt

import neso._native as _native
from neso.engine.addons.image_positions import rotary_positions
from neso.engine.addons.input_embeddings import NO_EMBEDDINGS, EmbeddingPlan
from neso.engine.core.step_plan import StepPlan
from neso.engine.lora.adapter import LoraAdapter, LoraPlan, output_widths
from neso.engine.parallel.communicator import Communicator
from neso.engine.parallel.sharding import Shard, open_tensors, shard_adapter, shard_of
from neso.engine.pooling.pooler import PoolingPlan
from neso.engine.runners.base import CacheLayout, Capability, Logits, PackedAdapter, SpecRunner
from neso.engine.runners.loading_progress import show_progress
from neso.engine.runners.native.packed_adapter import AdapterKind, NativeAdapter
from neso.engine.runners.native.packed_decoder import (
    PackedDecoder,
    PackedExperts,
    PackedLayer,
    PackedMLP,
    count_items,
    pack_items,
    read_engine,
)
from neso.engine.runners.native.packing import KINDS, Arena, reject_fp8
from neso.engine.runners.rotary_tables import RotaryTables
from neso.engine.runners.runner_options import DEFAULT_OPTIONS, RunnerOptions, UnsupportedOption
from neso.engine.runners.shared_cache import CacheFormat, CacheShape, SharedCache
from neso.engine.sampling.token_sampling import RowMasks, SamplingBatch
from neso.engine.spec_decode.draft import NO_TREE, DraftTreePlan, token_positions
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.thread_placement import ThreadPlacement, place_threads
from neso.engine.weights.engine_directory import EngineDirectory
from neso.engine.weights.source import TensorSource

logger = logging.getLogger(__name__)

Float32Array = npt.NDArray[np.float32]

_NO_MASKS = RowMasks(np.empty(0, np.int32), np.empty((0, 0), np.int32))


class NativeRunner(SpecRunner):
    """Holds the packed weights, the KV cache and the thread team. Not thread-safe.

    Uses the best instruction set of the CPU, or the one named in the environment variable NESO_ISA.
    """

    capabilities: frozenset[Capability] = frozenset(
        {
            "attention_sinks",
            "hidden_states",
            "input_embeddings",
            "lora",
            "ranks",
            "shared_cache",
            "thread_binding",
            "tree_attention",
        }
    )

    def __init__(self, shard: Shard, weights: PackedDecoder, threads: ThreadPlacement) -> None:
        super().__init__(shard.whole)
        self._shard = shard
        self._threads = threads
        spec = shard.spec
        self._rotary = RotaryTables(spec.rotaries)
        self._logits = np.empty((0, spec.vocab_size), np.float32)
        self._whole_logits = np.empty((0, self.vocab_size), np.float32)  # used if the vocabulary is split
        self._communicator: Communicator | None = None
        self.isa = _native.default_isa()
        # The decoder holds pointers to the weights and the adapters.
        self._weights = _make_weights(spec, weights)
        self._decoder = _make_decoder(shard, self._weights, weights.cache_kind, self.isa, threads)
        self._decoder.set_sink_tokens(spec.sink_tokens)
        self._adapters: dict[int, NativeAdapter] = {}  # by slot
        self._adapter_kind: AdapterKind = "f32" if weights.cache_kind == "f32" else "bf16"
        self._hidden = np.empty((0, spec.hidden_size), np.float32)
        self._has_cache = False
        self.cache_format = CacheFormat(
            "native",
            "float32" if weights.cache_kind == "f32" else "bfloat16",
            *(spec.num_layers, spec.num_kv_heads, spec.head_dim),
        )
        self._moved: _native.Weights | None = None

    @classmethod
    def load(
        cls, spec: DecoderSpec, source: TensorSource, options: RunnerOptions = DEFAULT_OPTIONS
    ) -> NativeRunner:
        reject_fp8(options)
        threads = place_threads(options.num_threads, options.thread_binding)
        shard = shard_of(spec, options.layout)
        if isinstance(source, EngineDirectory):
            weights = read_engine(shard.spec, source, options)
        else:
            items = pack_items(open_tensors(shard, source), options, threads)
            shown = show_progress(items, count_items(shard.spec), "packing weights")
            weights = PackedDecoder.assemble(shard.spec, dict(shown))
        runner = cls(shard, weights, threads)
        if isinstance(source, EngineDirectory):
            threading.Thread(target=runner._move, args=(weights,), name="weights-mover", daemon=True).start()
        logger.info("native runner: %s kernels, %s", runner.isa, threads.describe())
        return runner

    def connect(self, communicator: Communicator) -> None:
        if communicator.native_all_reduce is None and self._shard.layout.tensor_parallel > 1:
            raise UnsupportedOption(
                "the native runner needs ranks that are started by mpirun, srun or the server, not by torchrun"
            )
        self._communicator = communicator
        if communicator.native_all_reduce is not None:
            self._decoder.set_all_reduce(communicator.native_all_reduce)

    def allocate_cache(self, layout: CacheLayout) -> None:
        num_blocks, block_size = layout.num_blocks, layout.block_size
        memory = None
        if layout.shared:
            num_layers = self._shard.spec.num_layers
            layer_bytes = self.cache_bytes_per_block(block_size) // num_layers
            self.shared_cache = SharedCache.create(CacheShape(num_layers, num_blocks, layer_bytes))
            memory = self.shared_cache.blocks.reshape(-1)
        elif self._threads.nodes:
            memory = _native.zero_pages(num_blocks * self.cache_bytes_per_block(block_size))
        if memory is not None and self._threads.nodes:
            # Any thread may read any block, and blocks are reused by other sequences.
            _native.interleave(memory, self._threads.nodes)
        self._decoder.allocate_cache(num_blocks, block_size, memory)
        self._has_cache = True

    def cache_bytes_per_block(self, block_size: int) -> int:
        bytes_per_block: int = self._decoder.cache_bytes_per_block(block_size)
        return bytes_per_block

    def step(self, plan: StepPlan) -> Float32Array:
        if not self._has_cache:
            raise RuntimeError("allocate_cache must come before the first step")
        if self._moved is not None:
            self._decoder.set_weights(self._moved)
            self._weights, self._moved = self._moved, None
        spec, layout = self._shard.spec, self._shard.layout
        if layout.size > 1 and self._communicator is None:
            raise RuntimeError("connect must come before the first step of a runner on several ranks")
        pooling, lora = plan.part(PoolingPlan), plan.part(LoraPlan)
        embeddings, tree = plan.part(EmbeddingPlan) or NO_EMBEDDINGS, plan.part(DraftTreePlan) or NO_TREE
        received = sent = None
        if not spec.has_embedding:
            received = np.empty((plan.num_tokens, spec.hidden_size), np.float32)
            self._connected.receive(received, layout.previous)
        if spec.has_head:
            logits_rows = plan.logits_rows
            rows = logits_rows if pooling is None else np.concatenate([logits_rows, pooling.rows])
        else:
            sent = np.empty((plan.num_tokens, spec.hidden_size), np.float32)
            logits_rows = rows = plan.logits_rows[:0]
        logits = self._logits_buffer(len(logits_rows))
        self._hidden = np.empty((len(rows) - len(logits_rows), self.hidden_size), np.float32)
        rotary = self._rotary.lookup(rotary_positions(plan, token_positions(plan))).values()
        self._decoder.step(
            plan.token_ids,
            plan.query_start,
            plan.num_computed,
            plan.block_tables,
            plan.block_copies,
            rows,
            list(rotary),
            logits,
            self._hidden,
            embeddings.positions,
            embeddings.rows,
            tree.slot_copies,
            tree.depths,
            tree.masks,
            None if lora is None else lora.slots,
            received,
            sent,
        )
        if sent is not None:
            self._connected.send(sent, layout.next)
            return logits
        return logits if layout.tensor_parallel == 1 else self._gather(logits)

    @property
    def _connected(self) -> Communicator:
        assert self._communicator is not None
        return self._communicator

    def _gather(self, logits: Float32Array) -> Float32Array:
        """Return the logits of the whole vocabulary on the first rank; on others, an array without rows."""
        parts = self._connected.gather(logits)
        if parts is None:
            return logits[:0]
        if len(logits) > len(self._whole_logits):
            self._whole_logits = np.empty((len(logits), self.vocab_size), np.float32)
        return np.concatenate(parts, axis=1, out=self._whole_logits[: len(logits)])

    def hidden_states(self) -> Float32Array:
        return self._hidden

    def keep_row_states(self) -> None:
        """Do nothing: row states are always kept."""

    def row_states(self, rows: list[int]) -> Float32Array:
        states = np.empty((len(rows), self.spec.hidden_size), np.float32)
        self._decoder.row_states(np.array(rows, np.int32), states)
        return states

    def choose(self, logits: Logits, draws: SamplingBatch) -> npt.NDArray[np.int32]:
        tokens = np.empty(len(draws), np.int32)
        masks = draws.masks or _NO_MASKS
        self._decoder.choose(
            logits[: len(draws)],
            draws.temperature,
            draws.top_k,
            draws.top_p,
            draws.min_p,
            draws.uniforms,
            tokens,
            masks.rows,
            masks.bits,
        )
        return tokens

    def pack_adapter(self, adapter: LoraAdapter) -> PackedAdapter:
        own = shard_adapter(adapter, self._shard)
        return NativeAdapter.pack(own, self._adapter_kind, output_widths(self._shard.spec))

    def set_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        assert adapter is None or isinstance(adapter, NativeAdapter)
        self._decoder.set_adapter(slot, adapter.native if adapter is not None else None)
        self._adapters.pop(slot, None)
        if adapter is not None:
            self._adapters[slot] = adapter

    def _move(self, weights: PackedDecoder) -> None:
        """Copy mapped weights into huge pages, while the first requests are served from the file mapping."""
        self._moved = _make_weights(self._shard.spec, weights.moved(Arena(self._threads)))

    def _logits_buffer(self, rows: int) -> Float32Array:
        """Return a reused buffer, because page faults of new memory would take as long as sampling."""
        if rows > len(self._logits):
            self._logits = np.empty((rows, self._shard.spec.vocab_size), np.float32)
        return self._logits[:rows]


def _make_decoder(
    shard: Shard, weights: _native.Weights, cache_kind: str, isa: str, threads: ThreadPlacement
) -> _native.Decoder:
    spec = shard.spec
    return _native.Decoder(
        vocab_size=shard.whole.vocab_size,
        vocab_begin=shard.vocabulary.start,
        vocab_end=shard.vocabulary.stop,
        all_heads=shard.whole.num_heads,
        all_kv_heads=shard.whole.num_kv_heads,
        owns_kv_heads=shard.owns_kv_heads,
        first_stage=spec.has_embedding,
        last_stage=spec.has_head,
        hidden_size=spec.hidden_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        norm=spec.norm,
        norm_eps=spec.norm_eps,
        activation=spec.activation,
        parallel=spec.parallel,
        norms_width=spec.qk_norm == "width",
        attention_scale=spec.attention_scale,
        attention_softcap=spec.attention_softcap or 0.0,
        embedding_scale=spec.embedding_scale,
        residual_scale=spec.residual_scale,
        logit_scale=spec.logit_scale,
        logit_softcap=spec.logit_softcap or 0.0,
        top_k=spec.experts.top_k if spec.experts else 0,
        normalized=spec.experts is not None and spec.experts.normalized,
        position_offset=spec.position_offset or 0,
        weights=weights,
        cache_kind=cache_kind,
        isa=isa,
        threads=threads.count,
        cpus=threads.cpus,
    )


def _make_weights(spec: DecoderSpec, weights: PackedDecoder) -> _native.Weights:
    embedding = weights.embedding
    tables = RotaryTables(spec.rotaries)
    rotaries = [-1 if rotary is None else tables.index(rotary) for rotary in spec.rotaries]
    return _native.Weights(
        [_make_layer(*args) for args in zip(weights.layers, spec.sliding_windows, rotaries, strict=True)],
        weights.vectors,
        None if weights.lm_head is None else weights.lm_head.native(),
        None if embedding is None else embedding.reshape(-1).view(np.uint8),
        "f32" if embedding is None else KINDS[embedding.dtype],
        weights.positions,
    )


def _make_layer(layer: PackedLayer, window: int | None, rotary: int) -> _native.Layer:
    """Create a native layer. `rotary`: index of the tables passed to each step, -1 for none."""
    mlp, experts = None, None
    if isinstance(layer.mlp, PackedExperts):
        shared = None if layer.mlp.shared is None else _make_mlp(layer.mlp.shared)
        made = [_make_mlp(expert) for expert in layer.mlp.experts]
        experts = _native.Experts(layer.mlp.router.native(), made, shared)
    else:
        mlp = _make_mlp(layer.mlp)
    return _native.Layer(
        layer.vectors, layer.qkv.native(), layer.output.native(), mlp, experts, window or 0, rotary
    )


def _make_mlp(mlp: PackedMLP) -> _native.Mlp:
    gate = None if mlp.gate is None else mlp.gate.native()
    return _native.Mlp(gate, mlp.up.native(), mlp.down.native())
