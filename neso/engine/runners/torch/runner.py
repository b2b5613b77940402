"""The torch runner: executes a spec on a GPU with Triton kernels, or on the CPU with plain torch."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from neso.engine.core.step_plan import StepPlan
from neso.engine.lora.adapter import LoraAdapter, LoraPlan
from neso.engine.parallel.communicator import Communicator
from neso.engine.parallel.sharding import Shard, shard_adapter, shard_of
from neso.engine.pooling.pooler import PoolingPlan
from neso.engine.runners.base import CacheLayout, Capability, Float32Array, PackedAdapter, SpecRunner
from neso.engine.runners.rotary_tables import RotaryTables
from neso.engine.runners.runner_options import DEFAULT_OPTIONS, RunnerOptions
from neso.engine.runners.shared_cache import CacheFormat
from neso.engine.runners.step_memory import StepSize
from neso.engine.runners.torch.adapters import AdapterSlots, TorchAdapter
from neso.engine.runners.torch.attention import AttentionNeeds, check_attention
from neso.engine.runners.torch.decode_graphs import DecodeGraphs
from neso.engine.runners.torch.decoder import Decoder
from neso.engine.runners.torch.device_memory import DeviceMemory
from neso.engine.runners.torch.device_runner import DeviceRunner, operations_for, prepare_device
from neso.engine.runners.torch.kv_cache import HeadShape, KVCache
from neso.engine.runners.torch.ranks import DeviceRanks, Ranks, SingleRank, UnconnectedRanks
from neso.engine.runners.torch.step_inputs import choose_tile_queries, step_inputs
from neso.engine.runners.torch.weights import Experts, WeightLoader
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.weights.source import TensorSource

logger = logging.getLogger(__name__)


class TorchRunner(DeviceRunner, SpecRunner):
    """Holds the weights and the KV cache of a shard and, on a GPU, CUDA graphs of decode steps."""

    capabilities: frozenset[Capability] = frozenset(
        {
            *("attention_backends", "attention_sinks", "hidden_states", "host_cache", "input_embeddings"),
            *("lora", "ranks", "shared_cache", "tree_attention"),
        }
    )

    def __init__(
        self,
        shard: Shard,
        decoder: Decoder,
        device: torch.device,
        max_graph_batch: int = DEFAULT_OPTIONS.max_cuda_graph_batch,
    ) -> None:
        super().__init__(shard.whole)
        spec = shard.spec
        self.shard = shard
        self.device = device
        self.dtype = decoder.weights.dtype
        self.heads = [HeadShape(spec.num_kv_heads, spec.head_dim, spec.head_dim)] * spec.num_layers
        self.cache_format = CacheFormat(
            "tokens",
            str(self.dtype).removeprefix("torch."),
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
        )
        self._decoder = decoder
        self._max_graph_batch = max_graph_batch
        self._graphs: DecodeGraphs | None = None
        self._hidden = torch.empty(0, spec.hidden_size)
        self._row_states = torch.empty(0, spec.hidden_size)
        self._keeps_row_states = False

    @classmethod
    def load(
        cls, spec: DecoderSpec, source: TensorSource, options: RunnerOptions = DEFAULT_OPTIONS
    ) -> TorchRunner:
        device = prepare_device(options)
        operations = operations_for(device, options)
        shard = shard_of(spec, options.layout)
        weights = WeightLoader(shard, source, options, device).load()
        logger.info("torch runner: %s, %s", device, weights.dtype)
        adapters = AdapterSlots(shard.spec, options.lora_slots, options.max_lora_rank, weights.dtype, device)
        if adapters.slots:
            logger.info("%.2f GB reserved for %d LoRA adapters", adapters.num_bytes / 1e9, adapters.slots)
        cos_sin = _cos_sin(shard.spec, device)
        ranks = SingleRank() if options.layout.size == 1 else UnconnectedRanks()
        decoder = Decoder(shard, weights, operations, cos_sin, adapters, ranks)
        runner = cls(shard, decoder, device, options.max_cuda_graph_batch)
        needs = AttentionNeeds(runner.heads, runner.dtype, options.block_size, spec.sink_tokens)
        check_attention(operations.attention, needs)
        return runner

    def connect(self, communicator: Communicator) -> None:
        self.use_ranks(DeviceRanks.open(self.shard, self.device, communicator))

    def use_ranks(self, ranks: Ranks) -> None:
        """Set the collectives of the step."""
        self._decoder = replace(self._decoder, ranks=ranks)

    def allocate_cache(self, layout: CacheLayout) -> None:
        super().allocate_cache(layout)
        cache = self._cache
        if cache is not None and cache.shared is not None:
            self.shared_cache = cache.shared.memory
        if cache is not None and self._uses_graphs:
            self._graphs = self._capture(cache, self._max_table_length(layout))

    def largest_plan(self, size: StepSize) -> StepPlan:
        plan = super().largest_plan(size)
        if not self._decoder.adapters.slots:
            return plan
        return plan.with_part(LoraPlan(np.zeros(plan.num_sequences, np.int32)))

    def measure_graphs(self, size: StepSize, cache: KVCache, memory: DeviceMemory) -> int:
        if not self._uses_graphs:
            return 0
        memory.begin()
        graphs = self._capture(cache, -(-size.max_model_len // size.block_size))
        taken = memory.taken()
        del graphs
        return taken

    @property
    def _uses_graphs(self) -> bool:
        if self.device.type != "cuda" or not self._max_graph_batch:
            return False
        # Without kernels for all experts of a layer, the host must read the number of rows of each.
        mlps = (layer.mlp for layer in self._decoder.weights.layers)
        return all(mlp.stacked for mlp in mlps if isinstance(mlp, Experts))

    def _capture(self, cache: KVCache, max_table_length: int) -> DecodeGraphs:
        # With the Triton kernel: attention of a library is planned on the host, which cannot be captured.
        decoder = replace(self._decoder, operations=operations_for(self.device, DEFAULT_OPTIONS))
        return DecodeGraphs(
            lambda inputs: decoder.forward(inputs, cache),
            cache.layout.block_size,
            cache.padding_block,
            max_table_length,
            min(cache.layout.max_num_seqs, self._max_graph_batch),
            self.device,
            self.spec.sink_tokens,
            self._decoder.adapters.slots,
        )

    def store_shared(self, blocks: list[int]) -> None:
        assert self._cache is not None and self._cache.shared is not None
        self._cache.shared.store(blocks)

    def load_shared(self, blocks: list[int]) -> None:
        assert self._cache is not None and self._cache.shared is not None
        self._cache.shared.load(blocks)

    def forward(self, plan: StepPlan, cache: KVCache, chosen: Tensor | None) -> Tensor:
        if self._graphs is not None and not self._keeps_row_states and self._graphs.fits(plan):
            return self._graphs.run(plan, chosen)
        inputs = step_inputs(
            plan,
            cache.layout.block_size,
            self.device,
            chosen,
            sinks=self.spec.sink_tokens,
            tile_queries=choose_tile_queries(
                self.spec.num_heads // self.spec.num_kv_heads, self.spec.head_dim
            ),
        )
        if plan.part(PoolingPlan) is None and not self._keeps_row_states:
            return self._decoder.forward(inputs, cache)
        states, num_logits = self._decoder.final_states(inputs, cache), len(plan.logits_rows)
        self._row_states, self._hidden = states[:num_logits], states[num_logits:]
        return self._decoder.logits(self._row_states)

    def hidden_states(self) -> Float32Array:
        states: Float32Array = self._hidden.float().cpu().numpy()
        return states

    def keep_row_states(self) -> None:
        self._keeps_row_states = True

    def row_states(self, rows: list[int]) -> Float32Array:
        states: Float32Array = self._row_states[rows].float().cpu().numpy()
        return states

    def pack_adapter(self, adapter: LoraAdapter) -> PackedAdapter:
        return TorchAdapter.convert(shard_adapter(adapter, self.shard), self.dtype)

    def set_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        assert adapter is None or isinstance(adapter, TorchAdapter)
        self._decoder.adapters.set(slot, adapter)

    def _max_table_length(self, layout: CacheLayout) -> int:
        length = -(-self.max_position // layout.block_size)
        # Windows free blocks but keep their table entries, so a table may have more entries than the cache has blocks.
        return length if self.window is not None else min(length, layout.num_blocks)


def _cos_sin(spec: DecoderSpec, device: torch.device) -> list[Tensor | None]:
    """Return cosines and sines of each layer; layers with the same rotation share a tensor."""
    tables = {
        rotary: torch.from_numpy(np.concatenate([cos, sin], axis=1)).to(device)
        for rotary, (cos, sin) in RotaryTables(spec.rotaries)
        .lookup(np.arange(spec.max_position, dtype=np.int32))
        .items()
    }
    return [None if rotary is None else tables[rotary] for rotary in spec.rotaries]
