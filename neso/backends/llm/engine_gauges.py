"""What an engine says of itself, as gauges: by vLLM's names, and by TensorRT-LLM's."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from neso.backends.generation_metrics import ENGINE_FAMILIES
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import EngineInfo
from neso.server.metrics.kv_cache import FAMILY as KV_CACHE_FAMILY
from neso.server.metrics.kv_cache import LABEL as KV_CACHE_LABEL
from neso.server.metrics.registry import MetricsRegistry

Read = Callable[[EngineStats], float]


class EngineGauges:
    """Reads `stats` when they are scraped."""

    def __init__(
        self,
        registry: MetricsRegistry,
        model: str,
        version: str,
        stats: Callable[[], EngineStats],
        info: EngineInfo,
    ) -> None:
        self._registry, self._model, self._version = registry, model, version
        self._stats = stats
        self._unwatch: list[Callable[[], None]] = []
        self._vllm(info)
        self._speculation(info)
        self._tensorrt_llm(info)

    def close(self) -> None:
        """Forget the gauges of a model that is unloaded."""
        for unwatch in self._unwatch:
            unwatch()

    def _watch(self, name: str, help: str, read: Read, **further: str) -> None:
        stats = self._stats
        self._unwatch.append(
            self._registry.watch(name, help, self._model, self._version, lambda: read(stats()), **further)
        )

    def _vllm(self, info: EngineInfo) -> None:
        reads: dict[str, Read] = {
            "num_requests_running": lambda s: s.num_running,
            "num_requests_waiting": lambda s: s.num_waiting,
            "kv_cache_usage_perc": _used_share,
            "num_preemptions_total": lambda s: s.preemptions,
            "prefix_cache_queries_total": lambda s: s.prefix_queried_tokens,
            "prefix_cache_hits_total": lambda s: s.prefix_hit_tokens,
        }
        for name, read in reads.items():
            self._watch(f"vllm:{name}", ENGINE_FAMILIES[f"vllm:{name}"], read)
        # The values are in the labels, as in vLLM.
        self._watch(
            "vllm:cache_config_info",
            "Information of the cache.",
            lambda s: 1,
            block_size=str(info.block_size),
            num_gpu_blocks=str(info.num_blocks),
            enable_prefix_caching=str(info.enable_prefix_caching),
        )

    def _speculation(self, info: EngineInfo) -> None:
        counters: dict[str, tuple[str, Read]] = {
            "num_drafts": ("Number of speculative drafts.", lambda s: s.drafts.drafts),
            "num_draft_tokens": ("Number of draft tokens.", lambda s: s.drafts.draft_tokens),
            "num_accepted_tokens": ("Number of accepted draft tokens.", lambda s: s.drafts.accepted_tokens),
        }
        for name, (help, read) in counters.items():
            self._watch(f"vllm:spec_decode_{name}_total", help, read)
        for place in range(info.num_speculative_tokens):
            self._watch(
                "vllm:spec_decode_num_accepted_tokens_per_pos_total",
                "Accepted draft tokens, by their place in the draft.",
                partial(_accepted_at, place),
                position=str(place),
            )

    def _tensorrt_llm(self, info: EngineInfo) -> None:
        def family(name: str, help: str, label: str, members: dict[str, Read]) -> None:
            for kind, read in members.items():
                self._watch(name, help, read, **{label: kind})

        family(
            "nv_trt_llm_request_metrics",
            "TRT LLM request metrics",
            "request_type",
            {
                "active": lambda s: s.num_requests,
                "max": lambda s: info.max_num_seqs,
                "scheduled": lambda s: s.num_decoding + s.num_context,
                "context": lambda s: s.num_context,
                "waiting": lambda s: s.num_waiting,
            },
        )
        family(
            "nv_trt_llm_runtime_memory_metrics",
            "TRT LLM runtime memory metrics",
            "memory_type",
            {"cpu": lambda s: s.host_memory, "gpu": lambda s: s.device_memory, "pinned": lambda s: 0},
        )
        family(
            KV_CACHE_FAMILY,
            "TRT LLM KV cache block metrics",
            KV_CACHE_LABEL,
            {
                "max": lambda s: s.num_blocks,
                "free": lambda s: s.num_blocks - s.num_used_blocks,
                "used": lambda s: s.num_used_blocks,
                "tokens_per": lambda s: info.block_size,
                "reused": lambda s: s.prefix_hit_tokens // info.block_size,
                "evicted": lambda s: s.prefix_evicted_blocks,
                "fraction": _used_share,
            },
        )
        family(
            "nv_trt_llm_general_metrics",
            "General TRT LLM metrics",
            "general_type",
            {"iteration_counter": lambda s: s.step, "timestamp": lambda s: int(time.time())},
        )
        if info.in_flight_batching:
            family(
                "nv_trt_llm_inflight_batcher_metrics",
                "TRT LLM inflight_batcher-specific metrics",
                "inflight_batcher_specific_metric",
                {
                    "generation_requests": lambda s: s.num_decoding,
                    "paused_requests": lambda s: s.num_paused,
                    "total_context_tokens": lambda s: s.num_context_tokens,
                    "micro_batch_id": lambda s: 0,
                },
            )
        else:
            family(
                "nv_trt_llm_v1_metrics",
                "TRT LLM v1-specific metrics",
                "v1_specific_metric",
                {
                    "total_context_tokens": lambda s: s.num_context_tokens,
                    "total_generation_tokens": lambda s: s.num_batched_tokens - s.num_context_tokens,
                    "empty_generation_slots": lambda s: info.max_num_seqs - s.num_running,
                },
            )


def _accepted_at(place: int, stats: EngineStats) -> float:
    accepted = stats.drafts.accepted_at
    return accepted[place] if place < len(accepted) else 0


def _used_share(stats: EngineStats) -> float:
    return stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
